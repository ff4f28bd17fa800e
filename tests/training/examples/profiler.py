"""Profile a training loop, and write a trace for each process."""

import os

from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed
from torch.optim import AdamW
from training.examples.data import Classifier, loaders


def main(folder):
    profile_kwargs = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=folder)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[profile_kwargs])
    set_seed(29)
    train_dataloader, _ = loaders()
    model = Classifier()
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    report = []
    with accelerator.profile() as prof:
        for batch in train_dataloader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report.append(accelerator.gather(loss.detach()).tolist())
    table = prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=10)
    report.append(("aten::" in table, "Self CPU" in table))
    accelerator.wait_for_everyone()
    report.append(sorted(os.listdir(folder)))
    accelerator.end_training()
    return report
