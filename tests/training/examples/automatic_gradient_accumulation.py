"""Halve the batch until it fits, and accumulate gradients to the batch that was wanted."""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.optim import AdamW
from training.examples.data import Accuracy, Classifier, loaders


def main(folder):
    observed_batch_size, tried, report = 8, [], []
    accelerator = Accelerator(cpu=True)
    set_seed(1)

    @find_executable_batch_size(starting_batch_size=int(observed_batch_size))
    def inner_training_loop(batch_size):
        nonlocal accelerator
        tried.append(batch_size)
        accelerator.free_memory()
        num_gradient_accumulation_steps = observed_batch_size // batch_size
        accelerator.gradient_accumulation_steps = num_gradient_accumulation_steps
        set_seed(1)
        model = Classifier()
        optimizer = AdamW(params=model.parameters(), lr=1e-2)
        train_dataloader, eval_dataloader = loaders(batch_size)
        model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader
        )
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            report.append((accelerator.gather(loss.detach()).tolist(), accelerator.sync_gradients))
        model.eval()
        metric = Accuracy()
        for batch in eval_dataloader:
            predictions = model(**batch)["logits"].argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
        report.append(metric.compute())

    inner_training_loop()
    accelerator.end_training()
    return [tried, report]
