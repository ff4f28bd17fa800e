"""Train each process by itself, and average weights now and then."""

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch.optim import SGD
from training.examples.data import Accuracy, Classifier, loaders


def main(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    set_seed(17)
    train_dataloader, eval_dataloader = loaders()
    model = Classifier()
    optimizer = SGD(params=model.parameters(), lr=0.1)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    metric, report = Accuracy(), []
    for _epoch in range(2):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
            for batch in train_dataloader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
                report.append(accelerator.gather(loss.detach()).tolist())
        model.eval()
        for batch in eval_dataloader:
            predictions = model(**batch)["logits"].argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
        report.append(metric.compute())
    accelerator.end_training()
    return report
