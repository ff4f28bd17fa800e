"""Published trainers, each on a small model and data that are made here: ``python programs.py FOLDER``.

For each program and number of ranks there is a folder then, with a file for each rank: whose `Accelerator` has trained,
the losses, and the sum of the trained weights. All ranks are forks of one process that has imported everything, which
takes longer than all of the training.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree"]
Found = tuple[Any, list[float], nn.Module]
"""The accelerator, losses, the model."""


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["[PAD]", "[EOS]", *WORDS])}, "[EOS]")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]")


def sentences() -> list[str]:
    return [f"{WORDS[i % 2]} {WORDS[2 + i % 3]} {WORDS[4 + i % 2]} on {WORDS[8 + i % 2]}" for i in range(24)]


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0))


ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}
"""Of trainers that transformers' Trainer is the base of."""


def of_transformers(trainer: Any, *, resume: bool = False) -> Found:
    trainer.train()
    if resume:
        trainer.train(resume_from_checkpoint=True)
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    return trainer.accelerator, losses, trainer.model


def transformers(folder: str) -> Found:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    data = [{"input_ids": torch.tensor([i % 30 + 1, 5, 9]), "labels": torch.tensor(i % 2)} for i in range(24)]
    arguments = TrainingArguments(
        folder, **ARGUMENTS, save_steps=5, gradient_accumulation_steps=2, eval_strategy="epoch", data_seed=7
    )
    model = BertForSequenceClassification(config)
    return of_transformers(Trainer(model, arguments, train_dataset=data, eval_dataset=data), resume=True)


def trl(folder: str) -> Found:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(folder, **ARGUMENTS, save_strategy="no", eval_strategy="epoch", bf16=False, max_length=16)
    data = Dataset.from_dict({"text": sentences()})
    return of_transformers(
        SFTTrainer(language_model(), arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer())
    )


def trl_dpo(folder: str) -> Found:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list(
        [{"prompt": "the cat", "chosen": f" {one}", "rejected": " tree tree"} for one in sentences()]
    )
    arguments = DPOConfig(folder, **ARGUMENTS, save_strategy="no", bf16=False, max_length=16)
    return of_transformers(
        DPOTrainer(language_model(), language_model(), arguments, train_dataset=data, processing_class=tokenizer())
    )


def peft(folder: str) -> Found:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(
        language_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    encode = tokenizer()
    data = [dict(encode(one), labels=encode(one)["input_ids"]) for one in sentences()]
    arguments = TrainingArguments(folder, **ARGUMENTS, save_steps=3)
    return of_transformers(Trainer(model, arguments, train_dataset=data), resume=True)


def sentence_transformers(folder: str) -> Found:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import StaticEmbedding

    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer()._tokenizer, embedding_dim=8)], device="cpu")
    data = Dataset.from_dict({"anchor": sentences(), "positive": sentences()[::-1]})
    arguments = SentenceTransformerTrainingArguments(folder, **{**ARGUMENTS, "num_train_epochs": 1}, save_strategy="no")
    return of_transformers(
        SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model))
    )


def pytorch_accelerated(_: str) -> Found:
    from pytorch_accelerated import Trainer

    model = network()
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    # Unseeded shuffles of several ranks have another order than with accelerate: see the page of differences.
    shuffled = {"num_workers": 0, "generator": torch.Generator().manual_seed(2)}
    trainer.train(
        rows(), 2, rows(), 4, gradient_accumulation_steps=2, gradient_clip_value=1.0,
        train_dataloader_kwargs=shuffled, eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    history = trainer.run_history
    losses = [*history.get_metric_values("train_loss_epoch"), *history.get_metric_values("eval_loss_epoch")]
    return trainer._accelerator, losses, model


def skorch(_: str) -> Found:
    from accelerate import Accelerator
    from skorch import NeuralNetClassifier
    from skorch.hf import AccelerateMixin

    class Net(AccelerateMixin, NeuralNetClassifier):
        """A classifier that trains with accelerate."""

    accelerator = Accelerator(cpu=True)
    net = Net(
        network, criterion=nn.CrossEntropyLoss, accelerator=accelerator, lr=0.1, max_epochs=3, batch_size=8, verbose=0,
        iterator_train__shuffle=True,
    )  # fmt: skip
    inputs, labels = rows().tensors
    net.fit(inputs.numpy(), labels.numpy())
    return accelerator, [*net.history[:, "train_loss"], *net.history[:, "valid_loss"]], net.module_


def torchkeras(folder: str) -> Found:
    from torch.utils.data import DataLoader
    from torchkeras import KerasModel

    model = network()
    keras = KerasModel(model, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loaders = DataLoader(rows(), batch_size=4, shuffle=True), DataLoader(rows(), batch_size=4)
    keras.fit(*loaders, epochs=2, ckpt_path=f"{folder}/best", plot=False, cpu=True, gradient_accumulation_steps=2)
    history = keras.history
    return keras.accelerator, [*history["train_loss"], *history["val_loss"]], model


def denoising_diffusion_pytorch(folder: str) -> Found:
    import denoising_diffusion_pytorch.denoising_diffusion_pytorch as package
    from PIL import Image

    package.cpu_count = lambda: 0  # workers of its loader
    images = Path(folder, f"images-{os.environ.get('RANK', '0')}")
    images.mkdir()
    noise = torch.randint(0, 255, (100, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels.numpy()).save(images / f"{number}.png")
    unet = package.Unet(dim=8, dim_mults=(1, 2))
    model = package.GaussianDiffusion(unet, image_size=8, timesteps=10, sampling_timesteps=2)
    losses: list[float] = []
    model.register_forward_hook(lambda *values: losses.append(values[-1].item()))
    trainer = package.Trainer(
        model, images, train_batch_size=8, gradient_accumulate_every=2, train_num_steps=4, save_and_sample_every=2,
        num_samples=4, results_folder=f"{folder}/results", calculate_fid=False,
    )  # fmt: skip
    trainer.train()
    trainer.accelerator.wait_for_everyone()  # rank 0 saves last
    trainer.load(2)
    return trainer.accelerator, losses, model


PROGRAMS: list[Callable[[str], Found]] = [
    transformers,
    trl,
    trl_dpo,
    peft,
    sentence_transformers,
    pytorch_accelerated,
    skorch,
    torchkeras,
    denoising_diffusion_pytorch,
]
NUM_RANKS = (1, 2)

MODULES = [
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "peft",
    "sentence_transformers.trainer",
    "pytorch_accelerated",
    "skorch.hf",
    "torchkeras",
    "denoising_diffusion_pytorch",
]
"""What the programs import."""


def import_all() -> None:
    """Import what the programs will."""
    if not hasattr(torch.ops.torchvision, "nms"):
        # PyPI's torchvision for Linux finds no operators beside a torch without CUDA, and fails for want of these two.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["library"] = library  # its end would take them away
    for module in MODULES:
        importlib.import_module(module)


def run_rank(program: Callable[[str], Found], folder: Path, rank: int, ranks: int, port: int) -> None:
    """Train, and write what was found."""
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with (folder / f"{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.manual_seed(0)
    accelerator, losses, model = program(str(folder))
    package = type(accelerator).__module__.partition(".")[0]
    found = [package, losses, sum(weight.sum().item() for weight in model.parameters())]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Run all programs."""
    torch.set_num_threads(1)
    import_all()
    for program in PROGRAMS:
        for ranks in NUM_RANKS:
            folder = Path(sys.argv[1], f"{program.__name__}-{ranks}")
            folder.mkdir(parents=True)
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            context = multiprocessing.get_context("fork")
            processes = [
                context.Process(target=run_rank, args=(program, folder, rank, ranks, port)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
