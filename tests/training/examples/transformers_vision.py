"""Train models for semantic segmentation, object detection and instance segmentation, as transformers' scripts do.

Two lines are not as in those scripts, since the numbers would differ on purpose (``nb_accelerate/compat/parity.md``):
the loader shuffles by a generator of its own, and accelerate is told of the processes, which these losses ask it for.
"""

import importlib
import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    get_scheduler,
)

SIDE = 64  # pixels
LABELS = 3
SIZES = [8, 8, 8, 16]


class Scenes(Dataset):
    """Noise with one to four rectangles, mirrored and brightened at random."""

    def __init__(self, task, rows, training):
        self.task, self.rows, self.training = task, rows, training

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        image = np.random.default_rng(index).random((SIDE, SIDE, 3), dtype=np.float32)
        objects = np.arange(1, 2 + index % 4)
        instances = np.zeros((SIDE, SIDE), dtype=np.int64)
        for number in objects:
            instances[8 * number : 8 * number + 7, 3 * number : 3 * number + 30] = number
        if self.training:
            if random.random() < 0.5:
                image, instances = image[:, ::-1], instances[:, ::-1]
            image = image * np.random.uniform(0.8, 1.2) + 0.01 * torch.randn(1).item()
        row = {"pixel_values": torch.tensor(image.copy(), dtype=torch.float32).permute(2, 0, 1)}
        masks = torch.tensor(instances.copy()) == torch.tensor(objects)[:, None, None]
        classes = torch.tensor(objects) % LABELS
        if self.task == "semantic segmentation":
            return row | {"labels": torch.tensor(instances.copy()) % LABELS}
        if self.task == "instance segmentation":
            return row | {"mask_labels": masks.float(), "class_labels": classes}
        pixels = [mask.nonzero().flip(1) for mask in masks]  # x and y of each
        low = torch.stack([place.amin(0) for place in pixels]) / SIDE
        high = torch.stack([place.amax(0) + 1 for place in pixels]) / SIDE
        return row | {"labels": {"class_labels": classes, "boxes": torch.cat([(low + high) / 2, high - low], 1)}}


def collate_fn(rows):
    batch = {name: [row[name] for row in rows] for name in rows[0]}
    batch["pixel_values"] = torch.stack(batch["pixel_values"])
    if isinstance(rows[0].get("labels"), torch.Tensor):
        batch["labels"] = torch.stack(batch["labels"])
    return batch


def make_model(task):
    small = {"decoder_layers": 2, "encoder_layers": 1, "num_queries": 8, "num_labels": LABELS}
    if task == "semantic segmentation":
        config = SegformerConfig(
            depths=[1] * 4, hidden_sizes=SIZES, num_attention_heads=[1] * 4, decoder_hidden_size=8, num_labels=LABELS
        )
        return SegformerForSemanticSegmentation(config)
    if task == "object detection":
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=SIZES, depths=[1] * 4, layer_type="basic", out_features=["stage4"]
        )
        heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
        return DetrForObjectDetection(
            DetrConfig(backbone_config=backbone, auxiliary_loss=True, d_model=16, **small, **heads, **widths)
        )
    backbone = SwinConfig(
        image_size=SIDE,
        embed_dim=8,
        depths=[1] * 4,
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=[f"stage{number}" for number in range(1, 5)],
    )
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    widths |= dict.fromkeys(("encoder_feedforward_dim", "dim_feedforward"), 16)
    model = Mask2FormerForUniversalSegmentation(
        Mask2FormerConfig(backbone_config=backbone, num_attention_heads=2, train_num_points=64, **small, **widths)
    )
    for name, parameter in model.named_parameters():
        if "swin.layernorm" in name:  # unused, which DistributedDataParallel would complain of
            parameter.requires_grad = False
    return model


def train(task):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    importlib.import_module("accelerate").PartialState(cpu=True)
    set_seed(23, device_specific=True)  # other augmentations on each rank
    model = make_model(task)
    loader = {"batch_size": 2, "collate_fn": collate_fn}
    order = torch.Generator().manual_seed(1)
    train_dataloader = DataLoader(Scenes(task, 18, training=True), shuffle=True, generator=order, **loader)
    eval_dataloader = DataLoader(Scenes(task, 7, training=False), **loader)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=10)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    report = []
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            seen = float(batch["pixel_values"].double().sum())
            report.append((seen, accelerator.gather(loss.detach()).tolist(), lr_scheduler.get_last_lr()))
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            logits = outputs.class_queries_logits if task == "instance segmentation" else outputs.logits
            found = accelerator.gather_for_metrics(logits.argmax(1))
            report.append((outputs.loss.item(), len(found), found.double().sum().item()))
    numbers = torch.rand(()).item(), random.random(), np.random.random()
    report.append((numbers, sum(weight.double().sum().item() for weight in model.parameters())))
    return report


def main(folder):
    return [train(task) for task in ("semantic segmentation", "object detection", "instance segmentation")]
