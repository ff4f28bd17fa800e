"""Record losses and metrics with a tracker of one's own."""

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from torch.optim import AdamW
from training.examples.data import Accuracy, Classifier, loaders

logger = get_logger(__name__)


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name="run"):
        super().__init__()
        self.run_name, self.entries = run_name, []

    @property
    def tracker(self):
        return self.entries

    @on_main_process
    def store_init_configuration(self, values):
        self.entries.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.entries.append((step, values))

    @on_main_process
    def finish(self):
        self.entries.append("finished")


def main(folder):
    PartialState(cpu=True)  # before the tracker asks which process is the main one
    tracker = ListTracker("run")
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    accelerator.init_trackers("example", {"lr": 0.01, "seed": 31})
    logger.info(accelerator.state, main_process_only=False)
    set_seed(31)
    train_dataloader, eval_dataloader = loaders()
    model = Classifier()
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    metric = Accuracy()
    for epoch in range(2):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            loss = model(**batch)["loss"]
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=step)
        model.eval()
        for batch in eval_dataloader:
            predictions = model(**batch)["logits"].argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
        accelerator.log(metric.compute() | {"train_loss": total_loss.item() / len(train_dataloader)}, step=epoch)
    same = accelerator.get_tracker("list", unwrap=True) is tracker.entries if accelerator.is_main_process else True
    accelerator.end_training()
    return [same, tracker.entries if accelerator.is_main_process else None]
