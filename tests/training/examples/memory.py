"""Look for the largest batch that fits."""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.optim import AdamW
from training.examples.data import Classifier, loaders


def main(folder):
    accelerator = Accelerator(cpu=True)
    report = []

    @find_executable_batch_size(starting_batch_size=16)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        set_seed(19)
        model = Classifier()
        optimizer = AdamW(params=model.parameters(), lr=1e-2)
        train_dataloader, _ = loaders(batch_size)
        model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
        for batch in train_dataloader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if batch_size > 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            optimizer.step()
            optimizer.zero_grad()
            report.append((batch_size, accelerator.gather(loss.detach()).tolist()))

    inner_training_loop()
    accelerator.end_training()
    return report
