"""Send gradients as 16-bit numbers, and as low-rank factors."""

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.optim import SGD
from training.examples.data import Classifier, loaders


def train(hook, **options):
    ddp_kwargs = DistributedDataParallelKwargs(comm_hook=hook, **options)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp_kwargs])
    set_seed(37)
    train_dataloader, _ = loaders()
    model = Classifier()
    optimizer = SGD(params=model.parameters(), lr=0.1)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    report = []
    for _epoch in range(2):
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            report.append(accelerator.gather(loss.detach()).tolist())
    return report


def main(folder):
    low_rank = {
        "matrix_approximation_rank": 2,
        "start_powerSGD_iter": 2,
        "use_error_feedback": False,
        "warm_start": False,
    }
    return [
        train(DDPCommunicationHookType.FP16),
        train(DDPCommunicationHookType.POWER_SGD, comm_state_option=low_rank),
    ]
