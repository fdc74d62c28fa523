"""Training loops of models that look at images for more than their class."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.loop import Log, Optimize


class DoubleConv(nn.Sequential):
    """(convolution, normalisation, ReLU) twice, as U-Nets have it."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(
            nn.Conv2d(first, last, 3, padding=1, bias=False), nn.BatchNorm2d(last), nn.ReLU(inplace=True),
            nn.Conv2d(last, last, 3, padding=1, bias=False), nn.BatchNorm2d(last), nn.ReLU(inplace=True),
        )  # fmt: skip


def without_forgetting(optimize: Optimize, log: Log) -> None:
    """Learning without forgetting: from the fourth step on a frozen copy of the model teaches it; later the best
    weights are loaded, and the optimizer is a new one."""

    class Net(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.stem, self.fc = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
            self.blocks = nn.ModuleList(DoubleConv(width, width) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block(x)
            return self.fc(x.mean((2, 3)))

    model, old = Net(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimize(model, optimizer=optimizer)
    for step in range(7):
        if step == 3:
            old, best = copy.deepcopy(model).eval().requires_grad_(False), copy.deepcopy(model.state_dict())
        if step == 5:
            model.load_state_dict(best)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        images, labels = torch.randn(16, 3, 20, 20), torch.randint(10, (16,))
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        if old is not None:
            loss = loss + F.kl_div(logits.log_softmax(-1), old(images).softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)


def segmentation(optimize: Optimize, log: Log) -> None:
    """Segmentation in the manner of Pytorch-UNet: cross entropy and Dice outside of the model, RMSprop, clipping, a
    validation score within the epoch that the scheduler reads; the last batch is smaller."""

    class UNet(nn.Module):
        def __init__(self, channels: int, classes: int, width: int = 12) -> None:
            super().__init__()
            self.inc, self.down = DoubleConv(channels, width), DoubleConv(width, 2 * width)
            self.bottom = DoubleConv(2 * width, 2 * width)
            self.up, self.outc = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, classes, 1)
            self.join, self.out_join = DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, 2 * width)

        def forward(self, x: Tensor) -> Tensor:
            x1 = self.inc(x)
            x2 = self.down(F.max_pool2d(x1, 2))
            x3 = F.interpolate(self.bottom(F.max_pool2d(x2, 2)), scale_factor=2, mode="bilinear", align_corners=True)
            y = self.up(self.join(torch.cat([x2, x3], dim=1)))
            return self.outc(self.out_join(torch.cat([x1, y], dim=1)))

    def dice_loss(probabilities: Tensor, target: Tensor, epsilon: float = 1e-6) -> Tensor:
        inter = 2 * (probabilities * target).sum(dim=(-1, -2))
        sets_sum = probabilities.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
        sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
        return 1 - ((inter + epsilon) / (sets_sum + epsilon)).mean()

    model = UNet(3, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    criterion = nn.CrossEntropyLoss()
    optimize(model, optimizer=optimizer)
    images, masks = torch.rand(44, 3, 48, 48), torch.randint(0, 4, (44, 48, 48))
    loader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True)
    for _ in range(2):
        model.train()
        for number, (image, true_masks) in enumerate(loader):
            masks_pred = model(image)
            loss = criterion(masks_pred, true_masks)
            one_hot = F.one_hot(true_masks, 4).permute(0, 3, 1, 2).float()
            loss += dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log(loss=loss)
            if number == 3:
                model.eval()
                with torch.no_grad():
                    score = (model(images[:4]).argmax(1) == masks[:4]).float().mean()
                model.train()
                scheduler.step(score)


def detection(optimize: Optimize, log: Log) -> None:
    """Detection in the manner of DETR: queries are matched to a changing number of objects by scipy, on values;
    losses of all decoder layers in a dict, weighted by name; clipping, two groups of parameters."""
    from scipy.optimize import linear_sum_assignment

    class DETR(nn.Module):
        def __init__(self, width: int = 64, queries: int = 20) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 24, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(24, 48, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(48, width, 3, 2, 1),
            )
            self.encoder = nn.TransformerEncoderLayer(width, 4, 128, 0.1, batch_first=True)
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(width, 4, 128, 0.1, batch_first=True) for _ in range(2)
            )
            self.query, self.pos = nn.Parameter(torch.rand(queries, width)), nn.Parameter(torch.rand(64, width))
            self.class_embed, self.bbox_embed = nn.Linear(width, 6), nn.Linear(width, 4)

        def forward(self, images: Tensor) -> dict[str, object]:
            memory = self.encoder(self.backbone(images).flatten(2).transpose(1, 2) + self.pos)
            h, layers = self.query.expand(len(images), -1, -1), []
            for layer in self.decoder:
                h = layer(h, memory)
                layers.append({"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()})
            return {**layers[-1], "aux_outputs": layers[:-1]}

    @torch.no_grad()
    def matcher(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        out_prob, out_bbox = outputs["pred_logits"].softmax(-1), outputs["pred_boxes"]
        indices = []
        for prob, bbox, target in zip(out_prob, out_bbox, targets, strict=True):
            cost = 5 * torch.cdist(bbox, target["boxes"], p=1) - prob[:, target["labels"]]
            rows, columns = linear_sum_assignment(cost.numpy())
            indices.append((torch.as_tensor(rows), torch.as_tensor(columns)))
        return indices

    def criterion(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        indices = matcher(outputs, targets)
        batch = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
        src = torch.cat([src for src, _ in indices])
        classes = torch.full(outputs["pred_logits"].shape[:2], 5)
        classes[batch, src] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices, strict=True)])
        boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices, strict=True)])
        weight = torch.tensor([1.0] * 5 + [0.1])
        return {
            "loss_ce": F.cross_entropy(outputs["pred_logits"].transpose(1, 2), classes, weight),
            "loss_bbox": F.l1_loss(outputs["pred_boxes"][batch, src], boxes, reduction="sum") / len(boxes),
        }

    model = DETR()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
        {"params": [p for n, p in model.named_parameters() if "backbone" in n], "lr": 1e-5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-4)
    optimize(model, optimizer=optimizer)
    model.train()
    for _ in range(10):
        images = torch.rand(16, 3, 64, 64)
        counts = torch.randint(1, 7, (16,)).tolist()
        targets = [{"labels": torch.randint(0, 5, (n,)), "boxes": torch.rand(n, 4)} for n in counts]
        outputs = model(images)
        losses = criterion(outputs, targets)
        for i, aux in enumerate(outputs["aux_outputs"]):
            losses.update({f"{name}_{i}": value for name, value in criterion(aux, targets).items()})
        loss = sum(value * (5 if "bbox" in name else 1) for name, value in losses.items())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        log(loss=loss, **losses)


def mean_teacher(optimize: Optimize, log: Log) -> None:
    """Mean teacher: a student learns from few labels and from the teacher's answers on all images; the teacher, an
    average of the student with batch normalisation in train mode, is another copy of the model; the consistency's
    weight ramps up."""

    def create_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.LeakyReLU(0.1), nn.Conv2d(24, 24, 3, padding=1),
            nn.BatchNorm2d(24), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(24, 48, 3, padding=1),
            nn.BatchNorm2d(48), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
        )  # fmt: skip

    model = create_model()
    ema_model = create_model()
    ema_model.load_state_dict(copy.deepcopy(model.state_dict()))
    for p in ema_model.parameters():
        p.detach_()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    optimize(model, optimizer=optimizer)
    global_step = 0
    for _ in range(2):
        model.train()
        ema_model.train()
        for _ in range(5):
            images = torch.rand(40, 3, 24, 24)
            student, teacher = images + 0.1 * torch.randn_like(images), images + 0.1 * torch.randn_like(images)
            target = torch.randint(0, 10, (40,)).masked_fill(torch.arange(40) >= 10, -1)
            with torch.no_grad():
                ema_logit = ema_model(teacher)
            class_logit = model(student)
            class_loss = F.cross_entropy(class_logit, target, ignore_index=-1, reduction="sum") / len(images)
            consistency = F.mse_loss(class_logit.softmax(1), ema_logit.softmax(1), reduction="sum") / len(images)
            loss = class_loss + min(1.0, global_step / 5) * 10 * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            alpha = min(1 - 1 / (global_step + 1), 0.99)
            with torch.no_grad():
                for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
                    ema_param.mul_(alpha).add_(param, alpha=1 - alpha)
            log(loss=loss, consistency=consistency)
        model.eval()
        with torch.no_grad():
            model(torch.rand(8, 3, 24, 24))


def multi_task(optimize: Optimize, log: Log) -> None:
    """Several tasks on one backbone, with a loss for each that the model weighs by learned uncertainties; only some
    tasks have labels in a step, and heads without them get no gradient; the backbone is frozen in the first epoch."""

    class MultiTask(nn.Module):
        def __init__(self, width: int = 24) -> None:
            super().__init__()
            self.backbone = nn.Sequential(DoubleConv(3, width), nn.MaxPool2d(2), DoubleConv(width, 2 * width))
            self.depth = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))
            self.normals = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 3, 1))
            self.scene = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 8))
            self.log_vars = nn.ParameterDict({t: nn.Parameter(torch.zeros(())) for t in ("depth", "normals", "scene")})

        def forward(self, images: Tensor, labels: dict[str, Tensor]) -> dict[str, Tensor]:
            features = self.backbone(images)
            losses = {}
            criteria: dict[str, Callable[..., Tensor]] = {
                "depth": F.l1_loss, "scene": F.cross_entropy,
                "normals": lambda a, b: 1 - F.cosine_similarity(a, b, dim=1).mean(),
            }  # fmt: skip
            for task, label in labels.items():
                losses[task] = criteria[task](getattr(self, task)(features), label)
            total = sum(torch.exp(-self.log_vars[t]) * loss + self.log_vars[t] for t, loss in losses.items())
            return {"loss": total, **losses}

    model = MultiTask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for epoch in range(2):
        model.backbone.requires_grad_(epoch > 0)
        for step in range(6):
            images = torch.rand(10, 3, 40, 40)
            labels = {"depth": torch.rand(10, 1, 20, 20), "scene": torch.randint(0, 8, (10,))}
            if step % 2:
                labels["normals"] = torch.randn(10, 3, 20, 20)
            optimizer.zero_grad()
            out = model(images, labels)
            out["loss"].backward()
            optimizer.step()
            log(**out)


def feature_hooks(optimize: Optimize, log: Log) -> None:
    """Distillation by features that forward hooks of student and teacher keep, from one step to the next."""

    class Net(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.stem, self.fc = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
                for _ in range(depth)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.fc(x.mean((2, 3)))

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            features[name] = output

        return hook

    teacher, student, features = Net(32, 3).eval(), Net(16, 4), dict[str, Tensor]()
    connect = nn.Conv2d(16, 32, 1)
    teacher.layers[1].register_forward_hook(keep("teacher"))
    student.layers[1].register_forward_hook(keep("student"))
    student.layers[3].register_forward_hook(keep("last"))
    optimizer = torch.optim.SGD([*student.parameters(), *connect.parameters()], lr=0.05, momentum=0.9)
    optimize(student, optimizer=optimizer)
    for _ in range(6):
        images, labels = torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,))
        with torch.no_grad():
            soft = (teacher(images) / 4).softmax(-1)
        logits = student(images)
        loss = F.cross_entropy(logits, labels)
        loss = loss + 16 * F.kl_div((logits / 4).log_softmax(-1), soft, reduction="batchmean")
        loss = loss + 10 * F.mse_loss(connect(features["student"]), features["teacher"])
        loss = loss + features["last"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
