"""Ten vision models at the sizes at which they are trained, and at tiny ones, with a loss and a batch of each; timm,
diffusers and transformers have to be installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_models import Batch, Candidate, Size, images, library

CLASSES = 1000
SINGLE_LABEL: Any = {"num_labels": CLASSES, "problem_type": "single_label_classification"}


class Classifier(nn.Module):
    """A model of timm with the cross entropy of its logits."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name, num_classes=CLASSES, **options)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values).float(), labels)


class Denoiser(nn.Module):
    """A U-Net of diffusers that predicts the noise in pictures of random steps."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        import diffusers

        self.unet = diffusers.UNet2DModel(**config)

    def forward(self, pictures: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.unet(pictures, times).sample.float(), noise)


class Detector(nn.Module):
    """DETR with losses of its classes and boxes against one target for each query: the usual matching reads values."""

    def __init__(self, config: transformers.DetrConfig) -> None:
        super().__init__()
        self.detr = transformers.DetrForObjectDetection(config)

    def forward(self, pixel_values: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        found = self.detr(pixel_values)
        return F.cross_entropy(found.logits.float().flatten(0, 1), labels.flatten()) + F.l1_loss(
            found.pred_boxes.float(), boxes
        )


def of_timm(title: str, name: str, tiny: str, samples: int, size: Size, side: int = 224) -> Candidate:
    """A classifier of timm."""
    real = size == "real"

    def make() -> nn.Module:
        return Classifier(name if real else tiny).train()

    return Candidate(title, make, images(side if real else 160, CLASSES), samples if real else 2, 1, "")


def convnext(size: Size) -> Candidate:
    sizes = {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}
    tiny = {"depths": [1, 1, 2, 1], "hidden_sizes": [32, 64, 128, 256]}
    config = transformers.ConvNextConfig(**(sizes if size == "real" else tiny), **SINGLE_LABEL)
    made = library("ConvNextForImageClassification", config, "ForSequenceClassification")
    side, samples = (224, 32) if size == "real" else (64, 4)
    return Candidate("ConvNeXt-B", made, images(side, CLASSES), samples, 1, "ConvNextLayer")


def segformer(size: Size) -> Candidate:
    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
    config = transformers.SegformerConfig(**(sizes if size == "real" else {"depths": [1, 1, 1, 1]}), num_labels=150)
    side, samples = (512, 8) if size == "real" else (64, 2)

    def batch(count: int) -> Batch:
        labels = torch.zeros(count, side, side, dtype=torch.int64)
        return {"pixel_values": torch.randn(count, 3, side, side), "labels": labels}

    made = library("SegformerForSemanticSegmentation", config, "ForSemanticSegmentation")
    return Candidate("SegFormer-B2", made, batch, samples, 1, "SegformerLayer")


def detr(size: Size) -> Candidate:
    real = size == "real"
    layers: Any = {"encoder_layers": 6, "decoder_layers": 6} if real else {"encoder_layers": 1, "decoder_layers": 1}
    depths = {} if real else {"depths": [1, 1, 1, 1]}
    backbone = transformers.ResNetConfig(**depths, out_features=["stage4"])
    config = transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, backbone=None, **layers)
    side, samples, queries = (800, 4, config.num_queries) if real else (128, 1, config.num_queries)

    def batch(count: int) -> Batch:
        labels = torch.zeros(count, queries, dtype=torch.int64)
        return {
            "pixel_values": torch.randn(count, 3, side, side),
            "labels": labels,
            "boxes": torch.rand(count, queries, 4),
        }

    return Candidate("DETR, ResNet-50", lambda: Detector(config).train(), batch, samples, 1, "DetrEncoderLayer")


def unet(size: Size) -> Candidate:
    """The U-Net of DDPM for pictures of 256 by 256 pixels."""
    side, samples, channels, blocks = (256, 8, (128, 128, 256, 256, 512, 512), 6) if size == "real" else (
        32, 2, (32, 64), 2
    )  # fmt: skip
    down, up = ["DownBlock2D"] * blocks, ["UpBlock2D"] * blocks
    down[-2], up[1] = "AttnDownBlock2D", "AttnUpBlock2D"
    config = {
        "sample_size": side,
        "block_out_channels": channels,
        "down_block_types": tuple(down),
        "up_block_types": tuple(up),
    }

    def batch(count: int) -> Batch:
        pictures = torch.randn(count, 3, side, side)
        return {"pictures": pictures, "times": torch.zeros(count, dtype=torch.int64), "noise": pictures.clone()}

    return Candidate("U-Net of DDPM", lambda: Denoiser(**config).train(), batch, samples, 1, "ResnetBlock2D")


VISION: Mapping[str, Callable[[Size], Candidate]] = {
    "ConvNeXt-B": convnext,
    "ResNet-50": partial(of_timm, "ResNet-50", "resnet50", "resnet10t", 64),
    "ViT-B/16": partial(of_timm, "ViT-B/16", "vit_base_patch16_224", "test_vit", 64),
    "Swin-S": partial(of_timm, "Swin-S", "swin_small_patch4_window7_224", "test_vit2", 32),
    "EfficientNet-B3": partial(of_timm, "EfficientNet-B3", "efficientnet_b3", "test_efficientnet", 32, side=300),
    "RegNetY-8GF": partial(of_timm, "RegNetY-8GF", "regnety_080", "regnety_002", 32),
    "MobileNetV3-L": partial(of_timm, "MobileNetV3-L", "mobilenetv3_large_100", "mobilenetv3_small_050", 128),
    "SegFormer-B2": segformer,
    "DETR, ResNet-50": detr,
    "U-Net of DDPM": unet,
}
"""The models by name, each made at a size."""
