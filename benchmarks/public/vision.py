"""Drivers of public programs that train on images."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.public.program import Log, Optimize, batches, definitions, epochs, imported, package


def unet(optimize: Optimize, log: Log) -> None:
    """train.py, with its own Dice loss and validation score within the epoch."""
    model = imported("Pytorch-UNet", "unet.unet_model").UNet(3, 2).to(memory_format=torch.channels_last)
    scores = imported("Pytorch-UNet", "utils.dice_score")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    criterion = nn.CrossEntropyLoss()
    optimize(model, optimizer=optimizer)
    images, masks = torch.rand(14, 3, 96, 96), torch.randint(0, 2, (14, 96, 96))
    model.train()
    for step, (image, true_masks) in enumerate(epochs(batches(images, masks, size=4), 8)):
        image = image.to(memory_format=torch.channels_last)
        masks_pred = model(image)
        loss = criterion(masks_pred, true_masks)
        one_hot = F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float()
        loss += scores.dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot, multiclass=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=loss)
        if step % 4 == 2:
            scheduler.step(_dice_score(model, scores, images[:4], masks[:4]))
            log()


@torch.inference_mode()
def _dice_score(model: nn.Module, scores: ModuleType, images: Tensor, masks: Tensor) -> float:
    model.eval()
    one_hot = F.one_hot(masks, 2).permute(0, 3, 1, 2).float()
    predicted = F.one_hot(model(images).argmax(dim=1), 2).permute(0, 3, 1, 2).float()
    model.train()
    return scores.multiclass_dice_coeff(predicted[:, 1:], one_hot[:, 1:], reduce_batch_first=False).item()


def simclr(optimize: Optimize, log: Log) -> None:
    """run.py and simclr.py: two views in one batch, its own InfoNCE loss, a scheduler after each epoch."""
    package("torchvision")
    model = imported("SimCLR", "models.resnet_simclr").ResNetSimCLR("resnet18", out_dim=128)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3, eta_min=0)
    simclr_class = definitions("SimCLR", "simclr.py").SimCLR
    settings = SimpleNamespace(batch_size=16, n_views=2, device="cpu", temperature=0.07)
    criterion = nn.CrossEntropyLoss()
    optimize(model, optimizer=optimizer)
    views = torch.rand(2, 64, 3, 64, 64)
    for _ in range(2):
        for first, second in torch.utils.data.DataLoader(list(zip(*views, strict=True)), 16, shuffle=True):
            images = torch.cat([first, second], dim=0)
            features = model(images)
            logits, labels = simclr_class.info_nce_loss(SimpleNamespace(args=settings), features)
            loss = criterion(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss)
        scheduler.step()


def byol(optimize: Optimize, log: Log) -> None:
    """README.md: the learner makes its target encoder in its first forward, and moves it after each step."""
    models = package("torchvision.models")
    learner = imported("byol-pytorch", "byol_pytorch.byol_pytorch").BYOL(
        models.resnet18(), image_size=64, hidden_layer="avgpool", projection_hidden_size=512
    )
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-4)
    optimize(learner, optimizer=optimizer)
    for _ in range(8):
        loss = learner(torch.randn(20, 3, 64, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.update_moving_average()
        log(loss=loss)


def vq_autoencoder(optimize: Optimize, log: Log) -> None:
    """examples/autoencoder.py: vector quantisation with the rotation trick, two losses."""
    package("einops")
    imported("vector-quantize-pytorch", "vector_quantize_pytorch")
    model = definitions("vector-quantize-pytorch", "examples/autoencoder.py").SimpleVQAutoEncoder(
        dim=32, codebook_size=256, rotation_trick=True, straight_through=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimize(model, optimizer=optimizer)
    for (x,) in epochs(batches(torch.rand(160, 1, 28, 28) * 2 - 1, size=64), 9):
        optimizer.zero_grad()
        out, _, cmt_loss = model(x)
        rec_loss = (out.clamp(-1.0, 1.0) - x).abs().mean()
        (rec_loss + 10 * cmt_loss).backward()
        optimizer.step()
        log(rec=rec_loss, cmt=cmt_loss)


def vq_vae_2(optimize: Optimize, log: Log) -> None:
    """train_vqvae.py: two codebooks that move by means, a sample in eval mode within the epoch."""
    model = imported("vq-vae-2-pytorch", "vqvae").VQVAE(channel=64)
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=3e-4), nn.MSELoss()
    optimize(model, optimizer=optimizer)
    for step, (image,) in enumerate(epochs(batches(torch.rand(20, 3, 64, 64) * 2 - 1, size=8), 9)):
        model.zero_grad()
        out, latent_loss = model(image)
        recon_loss = criterion(out, image)
        loss = recon_loss + 0.25 * latent_loss.mean()
        loss.backward()
        optimizer.step()
        log(mse=recon_loss, latent=latent_loss.mean())
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                model(image[:4])
            model.train()
            log()


def deit(optimize: Optimize, log: Log) -> None:
    """engine.py and losses.py: distillation from a teacher, an average of the weights, clipping."""
    utils, vit = package("timm.utils"), package("timm.models.vision_transformer")
    names = definitions("deit", "models.py", _cfg=vit._cfg)
    model = names.DistilledVisionTransformer(
        img_size=64, patch_size=8, num_classes=10, embed_dim=96, depth=4, num_heads=3, qkv_bias=True, drop_path_rate=0.1
    )
    teacher = package("torchvision.models").resnet18(num_classes=10).eval()
    criterion = imported("deit", "losses").DistillationLoss(
        package("timm.loss").LabelSmoothingCrossEntropy(0.1), teacher, "hard", 0.5, 1.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    optimize(model, optimizer=optimizer)
    average = utils.ModelEma(model, decay=0.99)
    model.train()
    for samples, targets in epochs(batches(torch.rand(44, 3, 64, 64), torch.randint(0, 10, (44,)), size=16), 9):
        loss = criterion(samples, model(samples), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        log(loss=loss)


def mae(optimize: Optimize, log: Log) -> None:
    """engine_pretrain.py: the model returns its loss, two batches a step, a rate that changes with each batch."""
    package("timm")
    numpy.float = float  # older numpy's
    model = _masked_autoencoder(definitions("mae", "models_mae.py"))
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    optimize(model, optimizer=optimizer)
    model.train()
    optimizer.zero_grad()
    for step, (samples,) in enumerate(epochs(batches(torch.rand(44, 3, 64, 64), size=16), 10)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 10
        loss, _, _ = model(samples, mask_ratio=0.75)
        value = loss.item()
        loss /= 2
        loss.backward()
        if (step + 1) % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        log(loss=value)
        if (step + 1) % 2 == 0:
            optimizer.zero_grad()


def _masked_autoencoder(names: ModuleType) -> nn.Module:
    """The model, whose blocks are called by an argument that timm no longer has."""
    block = names.Block
    names.Block = lambda *sizes, qk_scale=None, **options: block(*sizes, **options)
    return names.MaskedAutoencoderViT(
        img_size=64, patch_size=8, embed_dim=96, depth=4, num_heads=3, decoder_embed_dim=64, decoder_depth=2,
        decoder_num_heads=4,
    )  # fmt: skip


def siamese(optimize: Optimize, log: Log) -> None:
    """siamese_network/main.py: one network called twice in a forward, BCELoss, a validation after the epoch."""
    package("torchvision")
    model = definitions("examples", "siamese_network/main.py").SiameseNetwork()
    optimizer, criterion = torch.optim.Adadelta(model.parameters(), lr=1.0), nn.BCELoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    optimize(model, optimizer=optimizer)
    one, two, same = torch.rand(76, 1, 28, 28) * 255, torch.rand(76, 1, 28, 28) * 255, torch.randint(0, 2, (76,))
    for _ in range(2):
        model.train()
        for images_1, images_2, targets in batches(one, two, same.float(), size=16):
            optimizer.zero_grad()
            outputs = model(images_1, images_2).squeeze()
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            criterion(model(one[:8], two[:8]).squeeze(), same[:8].float())
        log()
        scheduler.step()


def super_resolution(optimize: Optimize, log: Log) -> None:
    """super_resolution/main.py: sub-pixel convolution, mean squared error, testing without eval mode."""
    model = definitions("examples", "super_resolution/model.py").Net(upscale_factor=3)
    criterion, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    optimize(model, optimizer=optimizer)
    small, large = torch.rand(44, 1, 24, 24), torch.rand(44, 1, 72, 72)
    for _ in range(3):
        for image, target in batches(small, large, size=16):
            optimizer.zero_grad()
            loss = criterion(model(image), target)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        with torch.no_grad():
            criterion(model(small[:10]), large[:10])
        log()


def mnist(optimize: Optimize, log: Log) -> None:
    """mnist/main.py: a small convolutional network with dropout, Adadelta, a scheduler and a test after each epoch."""
    model = definitions("examples", "mnist/main.py").Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    optimize(model, optimizer=optimizer)
    images, labels = torch.rand(300, 1, 28, 28), torch.randint(0, 10, (300,))
    for _ in range(2):
        model.train()
        for data, target in batches(images, labels, size=64):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            F.nll_loss(model(images[:200]), labels[:200], reduction="sum").item()
        log()
        scheduler.step()


def vae(optimize: Optimize, log: Log) -> None:
    """vae/main.py: random numbers in the forward, a summed loss of three outputs."""
    names = definitions("examples", "vae/main.py")
    model = names.VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    images = torch.rand(2200, 1, 28, 28)
    for _ in range(2):
        model.train()
        for (data,) in batches(images, size=512):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = names.loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            names.loss_function(model(images[:100])[0], images[:100], mu[:100], logvar[:100])
            model.decode(torch.randn(64, 20))
        log()


def dcgan(optimize: Optimize, log: Log) -> None:
    """dcgan/main.py: two models, the discriminator's gradients from two backwards, the generator's through it."""
    sizes = {"nz": 100, "ngf": 32, "ndf": 32, "nc": 3}
    names = definitions("examples", "dcgan/main.py", **sizes)
    generator, discriminator = names.Generator(1), names.Discriminator(1)
    generator.apply(names.weights_init)
    discriminator.apply(names.weights_init)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimize(discriminator, optimizer=optimizer_d)
    optimize(generator, optimizer=optimizer_g)
    for step, (real,) in enumerate(epochs(batches(torch.rand(44, 3, 64, 64) * 2 - 1, size=16), 9)):
        discriminator.zero_grad()
        label = torch.full((len(real),), 1.0)
        error_real = criterion(discriminator(real), label)
        error_real.backward()
        fake = generator(torch.randn(len(real), 100, 1, 1))
        label.fill_(0)
        error_fake = criterion(discriminator(fake.detach()), label)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1)
        error_generator = criterion(discriminator(fake), label)
        error_generator.backward()
        optimizer_g.step()
        log(real=error_real, fake=error_fake, generator=error_generator)
        if step % 4 == 0:
            fake = generator(torch.randn(16, 100, 1, 1))
            log()


def fast_neural_style(optimize: Optimize, log: Log) -> None:
    """fast_neural_style/neural_style: a content and a style loss by a frozen VGG outside of the model."""
    models = package("torchvision.models")
    folder = "fast_neural_style/neural_style"
    transformer = imported("examples", "transformer_net", within=folder).TransformerNet()
    utils = imported("examples", "utils", within=folder)
    layers, ends = models.vgg16().features.requires_grad_(False), (4, 9, 16, 23)
    optimizer, mse = torch.optim.Adam(transformer.parameters(), 1e-3), nn.MSELoss()

    def vgg(x: Tensor) -> list[Tensor]:
        found = []
        for number, layer in enumerate(layers[: ends[-1]], 1):
            x = layer(x)
            found += [x] * (number in ends)
        return found

    style = (torch.rand(1, 3, 64, 64) * 255).repeat(4, 1, 1, 1)
    gram_style = [utils.gram_matrix(y) for y in vgg(utils.normalize_batch(style))]
    optimize(transformer, optimizer=optimizer)
    transformer.train()
    for (x,) in epochs(batches(torch.rand(10, 3, 64, 64) * 255, size=4), 8):
        optimizer.zero_grad()
        y = utils.normalize_batch(transformer(x))
        features_y, features_x = vgg(y), vgg(utils.normalize_batch(x))
        content_loss = 1e5 * mse(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss += mse(utils.gram_matrix(ft_y), gm_s[: len(x)])
        style_loss *= 1e10
        (content_loss + style_loss).backward()
        optimizer.step()
        log(content=content_loss, style=style_loss)


def faster_rcnn(optimize: Optimize, log: Log) -> None:
    """references/detection/engine.py: a dict of losses, images and boxes of different numbers and sizes."""
    detection = package("torchvision.models.detection")
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=128, rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=60, box_batch_size_per_image=32,
    )  # fmt: skip
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.002, momentum=0.9, weight_decay=1e-4)
    optimize(model, optimizer=optimizer)
    model.train()
    for _ in range(8):
        images = [torch.rand(3, *torch.randint(90, 120, (2,)).tolist()) for _ in range(4)]
        targets = []
        for _ in images:
            corners = torch.rand(int(torch.randint(1, 5, ())), 2) * 40
            boxes = torch.cat([corners, corners + 10 + 30 * torch.rand_like(corners)], dim=1)
            targets.append({"boxes": boxes, "labels": torch.randint(1, 5, (len(boxes),))})
        losses = model(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(**losses)


def detr(optimize: Optimize, log: Log) -> None:
    """engine.py: images of different sizes padded with masks, a matching on values, losses of every decoder layer."""
    package("torchvision")
    models = imported("detr", "models.detr")
    misc, position = imported("detr", "util.misc"), imported("detr", "models.position_encoding")

    class Backbone(nn.Module):
        num_channels = 64

        def __init__(self) -> None:
            super().__init__()
            widths = 3, 16, 32, 64
            self.layers = nn.Sequential(
                *(
                    nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                    for a, b in itertools.pairwise(widths)
                )
            )
            self.position = position.PositionEmbeddingSine(32, normalize=True)

        def forward(self, samples):
            x = self.layers(samples.tensors)
            mask = F.interpolate(samples.mask[None].float(), size=x.shape[-2:]).to(torch.bool)[0]
            features = misc.NestedTensor(x, mask)
            return [features], [self.position(features)]

    transformer = imported("detr", "models.transformer").Transformer(
        d_model=64,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=128,
        return_intermediate_dec=True,
    )
    model = models.DETR(Backbone(), transformer, num_classes=5, num_queries=12, aux_loss=True)
    matcher = imported("detr", "models.matcher").HungarianMatcher(cost_class=1, cost_bbox=5, cost_giou=2)
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
    weights |= {f"{name}_0": value for name, value in weights.items()}
    criterion = models.SetCriterion(5, matcher, weights, eos_coef=0.1, losses=["labels", "boxes", "cardinality"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    optimize(model, optimizer=optimizer)
    model.train()
    for _ in range(8):
        images = [torch.rand(3, *torch.randint(80, 120, (2,)).tolist()) for _ in range(4)]
        targets = []
        for _ in images:
            boxes = torch.rand(int(torch.randint(1, 5, ())), 4) * 0.3 + 0.2
            targets.append({"boxes": boxes, "labels": torch.randint(0, 5, (len(boxes),))})
        outputs = model(misc.nested_tensor_from_tensor_list(images))
        found = criterion(outputs, targets)
        losses = sum(found[name] * weights[name] for name in found if name in weights)
        losses.item()
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        log(loss=losses)


def raft(optimize: Optimize, log: Log) -> None:
    """train.py: recurrent updates, a loss on each of the predicted flows, a gradient scaler, frozen batch norms."""
    model = imported("RAFT", "raft", within="core").RAFT(_Settings(small=False, mixed_precision=False, dropout=0.0))
    sequence_loss = definitions("RAFT", "train.py", MAX_FLOW=400).sequence_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-5, eps=1e-8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-4, 100, pct_start=0.05, cycle_momentum=False)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimize(model, optimizer=optimizer)
    model.train()
    model.freeze_bn()
    images = torch.rand(2, 5, 3, 128, 128) * 255
    for image1, image2, flow in epochs(batches(*images, torch.randn(5, 2, 128, 128), size=2), 8):
        optimizer.zero_grad()
        flow_predictions = model(image1, image2, iters=4)
        loss, _ = sequence_loss(flow_predictions, flow, torch.ones(len(flow), 128, 128), 0.8)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scheduler.step()
        scaler.update()
        log(loss=loss)


class _Settings(SimpleNamespace):
    """Options of a command line, some of which are looked for by `in`."""

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


def dino(optimize: Optimize, log: Log) -> None:
    """main_dino.py: crops of two sizes in one forward, a teacher moved by means, gradients set to None."""
    utils, vits = imported("dino", "utils"), imported("dino", "vision_transformer")
    sizes = {"patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    student, teacher = vits.VisionTransformer(**sizes, drop_path_rate=0.1), vits.VisionTransformer(**sizes)
    student = utils.MultiCropWrapper(student, vits.DINOHead(96, 256))
    teacher = utils.MultiCropWrapper(teacher, vits.DINOHead(96, 256))
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    package("torchvision")
    alone = SimpleNamespace(all_reduce=lambda _: None, get_world_size=lambda: 1)
    loss_of = definitions("dino", "main_dino.py", dist=alone, np=numpy)
    loss_of.DINOLoss.update_center.__wrapped__.__globals__["dist"] = alone
    criterion = loss_of.DINOLoss(256, 4, 0.04, 0.04, 0, 3)
    optimizer = torch.optim.AdamW(utils.get_params_groups(student), lr=5e-4)
    optimize(student, optimizer=optimizer)
    large, small = torch.rand(2, 10, 3, 64, 64), torch.rand(2, 10, 3, 32, 32)
    for step, images in enumerate(epochs(batches(*large, *small, size=4), 8)):
        teacher_output = teacher(images[:2])
        loss = criterion(student(images), teacher_output, step // 3)
        optimizer.zero_grad()
        loss.backward()
        utils.clip_gradients(student, 3.0)
        utils.cancel_gradients_last_layer(step // 3, student, 1)
        optimizer.step()
        with torch.no_grad():
            for own, average in zip(student.parameters(), teacher.parameters(), strict=True):
                average.data.mul_(0.99).add_(0.01 * own.detach().data)
        log(loss=loss)


def barlow_twins(optimize: Optimize, log: Log) -> None:
    """main.py without its wrapper for several cards: its own LARS, loss terms written in place."""
    models = package("torchvision.models")
    alone = SimpleNamespace(all_reduce=lambda _: None)
    names = definitions("barlowtwins", "main.py")
    model = names.BarlowTwins.__new__(names.BarlowTwins)
    nn.Module.__init__(model)
    model.args = SimpleNamespace(batch_size=16, lambd=0.0051)
    model.backbone = models.resnet18(zero_init_residual=True)
    model.backbone.fc = nn.Identity()
    model.projector = nn.Sequential(
        nn.Linear(512, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(inplace=True), nn.Linear(256, 256, bias=False)
    )
    model.bn = nn.BatchNorm1d(256, affine=False)
    names.torch = _with(torch, distributed=alone)
    names.BarlowTwins.forward.__globals__["torch"] = names.torch
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    optimizer = names.LARS(groups, lr=0, weight_decay=1e-6, weight_decay_filter=True, lars_adaptation_filter=True)
    optimize(model, optimizer=optimizer)
    views = torch.rand(2, 40, 3, 48, 48)
    for step, (y1, y2) in enumerate(epochs(batches(*views, size=16), 8)):
        for group, rate in zip(optimizer.param_groups, (0.2, 0.0048), strict=True):
            group["lr"] = rate * (step + 1) / 80
        optimizer.zero_grad()
        loss = model(y1, y2)
        loss.backward()
        optimizer.step()
        log(loss=loss)


def _with(module: ModuleType, **replaced: object) -> SimpleNamespace:
    """The attributes of a module with some others in their place."""
    return SimpleNamespace(**{**vars(module), **replaced})
