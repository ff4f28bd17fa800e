"""Stop on all processes as soon as the loss is small on one of them."""

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import SGD
from training.examples.data import Classifier, loaders


class EarlyStoppingCallback:
    def __init__(self, min_delta=0.0, patience=3):
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest_loss = 0, float("inf")

    def check_early_stopping(self, eval_loss):
        delta = self.lowest_loss - eval_loss
        if delta >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
        else:
            self.counter += 1
        return self.counter >= self.patience


def main(folder):
    accelerator = Accelerator(cpu=True)
    callback = EarlyStoppingCallback()
    set_seed(11)
    train_dataloader, _ = loaders()
    model = Classifier()
    optimizer = SGD(params=model.parameters(), lr=0.5)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    report, stopped = [], False
    for epoch in range(6):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report.append(accelerator.gather(loss.detach()).tolist())
            if callback.check_early_stopping(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                report.append(("stopped", epoch, step))
                stopped = True
                break
        if stopped:
            break
    accelerator.end_training()
    return report
