"""Accumulate gradients over batches, with a schedule, and evaluate after each epoch."""

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from training.examples.data import Accuracy, Classifier, loaders


def main(folder):
    gradient_accumulation_steps, num_epochs = 2, 2
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    set_seed(42)
    train_dataloader, eval_dataloader = loaders()
    model = Classifier()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    steps = len(train_dataloader) * num_epochs // gradient_accumulation_steps
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metric, report = Accuracy(), []
    for _epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch["input_ids"] = batch["input_ids"].to(accelerator.device)
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output["loss"]
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            report.append((accelerator.gather(loss.detach()).tolist(), lr_scheduler.get_last_lr()))
        model.eval()
        for batch in eval_dataloader:
            outputs = model(**batch)
            predictions = outputs["logits"].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        report.append(metric.compute())
    accelerator.end_training()
    return report
