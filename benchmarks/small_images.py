"""Small image models of timm and torchvision, where these are installed, with a loss and a batch."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CLASSES, BATCH, IMAGE = 10, 4, 64
TIMM = (
    "test_byobnet test_coatnet test_convnext test_convnext2 test_efficientnet test_efficientnet_evos "
    "test_efficientnet_gn test_mambaout test_maxvit test_nfnet test_resnet test_vit test_vit2 test_vit3 "
    "test_vit_relpos ghostnet_050 lcnet_050 levit_128s mobilenetv3_small_050 repghostnet_050 efficientvit_m0 "
    "shvit_s1 starnet_s050 edgenext_xx_small mobilevit_xxs pit_ti_224 regnetx_002 regnety_002 resnet10t "
    "resnetv2_18 tinynet_e dla46_c fasternet_t0 mambaout_femto swiftformer_xs inception_next_atto pvt_v2_b0 "
    "hgnetv2_b0 ese_vovnet19b_dw rexnet_100 visformer_tiny deit_tiny_patch16_224 convit_tiny coat_tiny "
    "tiny_vit_5m_224 efficientformerv2_s0 gernet_s fastvit_t8 skresnet18 legacy_seresnet18 "
    "xcit_nano_12_p16_224 poolformer_s12 repvit_m0_9 "
)
TORCHVISION = (
    "mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5 resnet18 regnet_y_400mf mobilenet_v2 densenet121 "
    "lraspp_mobilenet_v3_large"
)


class WithLoss(nn.Module):
    """A classifier or segmenter whose forward takes labels and returns the cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(pixel_values)
        if isinstance(logits, dict):
            logits = logits["out"]
        logits = sum(logits) if isinstance(logits, (tuple, list)) else logits
        return {"loss": functional.cross_entropy(logits, labels)}


@cache
def libraries() -> tuple[Any, Any] | None:
    """Return torchvision and timm, or None where they are not installed.

    Wheels of torchvision for CUDA lack their own operators beside a torch for the CPU; these models do without them.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        name = "torchvision._meta_registrations"
        sys.modules[name] = ModuleType(name)
        import torchvision
    except ImportError:
        return None
    try:
        import timm
    except ImportError:
        return None
    return torchvision, timm


def image_names() -> list[str]:
    """Return `timm:…` and `torchvision:…`, those of two libraries in turn; nothing where they are not installed."""
    if libraries() is None:
        return []
    return [f"timm:{name}" for name in TIMM.split()] + [f"torchvision:{name}" for name in TORCHVISION.split()]


def image_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of `image_names` with its loss, and a batch."""
    found = libraries()
    assert found is not None, "timm and torchvision are not installed"
    torchvision, timm = found
    library, _, short = name.partition(":")
    torch.manual_seed(0)
    if library == "torchvision":
        more = {"weights_backbone": None} if "lraspp" in short else {}
        model = torchvision.models.get_model(short, weights=None, num_classes=CLASSES, **more)
        size = IMAGE
    else:
        try:
            model, size = timm.create_model(short, num_classes=CLASSES, img_size=IMAGE), IMAGE
        except (TypeError, AssertionError):
            model, size = timm.create_model(short, num_classes=CLASSES), 96
    torch.manual_seed(1)
    shape = (BATCH, size, size) if "lraspp" in short else (BATCH,)
    batch = {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, shape)}
    return WithLoss(model).train(), batch
