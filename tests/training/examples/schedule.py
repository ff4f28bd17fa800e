"""Schedules that are stepped with the optimizer, by hand, and by what an epoch brought."""

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from training.examples.data import Classifier, loaders


def main(folder):
    accelerator = Accelerator(cpu=True)
    set_seed(41)
    train_dataloader, eval_dataloader = loaders()
    model, other = Classifier(), Classifier()
    optimizer = SGD(params=model.parameters(), lr=0.1, momentum=0.9)
    second = SGD(params=other.parameters(), lr=0.1)
    cycle = OneCycleLR(optimizer=optimizer, max_lr=0.2, epochs=2, steps_per_epoch=len(train_dataloader))
    plateau = ReduceLROnPlateau(second, patience=0)
    model, other, optimizer, second, train_dataloader, eval_dataloader, cycle = accelerator.prepare(
        model, other, optimizer, second, train_dataloader, eval_dataloader, cycle
    )
    report = []
    for epoch in range(2):
        for batch in train_dataloader:
            for network, one in ((model, optimizer), (other, second)):
                loss = network(**batch)["loss"]
                accelerator.backward(loss)
                one.step()
                one.zero_grad()
            cycle.step()
            report.append((accelerator.gather(loss.detach()).tolist(), cycle.get_last_lr()))
        plateau.step(1.0 + epoch)
        report.append([group["lr"] for group in second.param_groups])
    accelerator.end_training()
    return report
