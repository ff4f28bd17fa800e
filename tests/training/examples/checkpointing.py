"""Save after each epoch and in its middle, and go on from both, leaving out what was trained already."""

import os

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from training.examples.data import Accuracy, Classifier, loaders


def train(folder, checkpointing_steps, resume_from_checkpoint=None):
    config = ProjectConfiguration(project_dir=folder)
    accelerator = Accelerator(cpu=True, project_config=config)
    num_epochs, report = 3, []
    set_seed(7)
    train_dataloader, eval_dataloader = loaders()
    model = Classifier()
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    lr_scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(lr_scheduler)
    overall_step = starting_epoch = 0
    resume_step = None
    if resume_from_checkpoint is not None:
        accelerator.load_state(resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
        else:
            resume_step = int(training_difference.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
    for epoch in range(starting_epoch, num_epochs):
        model.train()
        if resume_from_checkpoint is not None and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            report.append((accelerator.gather(loss.detach()).tolist(), lr_scheduler.get_last_lr()))
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(folder, f"step_{overall_step}"))
        model.eval()
        metric = Accuracy()
        for batch in eval_dataloader:
            predictions = model(**batch)["logits"].argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
        report.append(metric.compute())
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    return report


def main(folder):
    return [
        train(folder, "epoch"),
        train(folder, None, os.path.join(folder, "epoch_1")),
        train(folder, 3),
        train(folder, None, os.path.join(folder, "step_3")),
    ]
