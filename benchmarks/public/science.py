"""Drivers of public programs that train on graphs, tables, rays and games, and one that trains by diffusion."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.public.program import Log, Optimize, batches, definitions, epochs, imported, package


def gat(optimize: Optimize, log: Log) -> None:
    """gat/main.py: attention between all nodes of a graph, the loss on some of them, two evaluations a step."""
    names = definitions("examples", "gat/main.py")
    model = names.GAT(64, 32, 4, 7, concat=True, dropout=0.6, leaky_relu_slope=0.2)
    adjacency = torch.eye(300) + (torch.rand(300, 300) < 0.02)
    _citations(model, torch.rand(300, 64), adjacency, optimize, log, rate=0.005)


def gcn(optimize: Optimize, log: Log) -> None:
    """gcn/main.py: the same loop with a sparse adjacency matrix and sparse features."""
    names = definitions("examples", "gcn/main.py")
    model = names.GCN(64, 16, 7, False, 0.5)
    adjacency = (torch.eye(300) + (torch.rand(300, 300) < 0.02)) / 7
    features = torch.rand(300, 64) * (torch.rand(300, 64) < 0.2)
    _citations(model, features.to_sparse(), adjacency.to_sparse(), optimize, log, rate=0.01)


def pygcn(optimize: Optimize, log: Log) -> None:
    """pygcn/train.py: a sparse adjacency matrix; the evaluation in eval mode is with gradients, and never goes back."""
    model = imported("pygcn", "pygcn.models").GCN(nfeat=256, nhid=64, nclass=7, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    optimize(model, optimizer=optimizer)
    features, labels = torch.rand(1500, 256), torch.randint(0, 7, (1500,))
    adjacency = ((torch.eye(1500) + (torch.rand(1500, 1500) < 0.003)) / 5).to_sparse()
    train, validation = torch.arange(400), torch.arange(400, 700)
    log()
    for _ in range(9):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)
        loss_train = F.nll_loss(output[train], labels[train])
        loss_train.backward()
        optimizer.step()
        log(train=loss_train)
        model.eval()
        output = model(features, adjacency)
        F.nll_loss(output[validation], labels[validation])
        log()


def _citations(
    model: nn.Module, features: Tensor, adjacency: Tensor, optimize: Optimize, log: Log, *, rate: float
) -> None:
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=5e-4), nn.NLLLoss()
    labels, nodes = torch.randint(0, 7, (len(features),)), torch.randperm(len(features))
    train, validation = nodes[100:], nodes[:100]
    optimize(model, optimizer=optimizer)
    log()
    for _ in range(9):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)
        loss = criterion(output[train], labels[train])
        loss.backward()
        optimizer.step()
        log(loss=loss)
        model.eval()
        for part in (train, validation):
            with torch.no_grad():
                output = model(features, adjacency)
                criterion(output[part], labels[part]).item()
        log()


def molecules(optimize: Optimize, log: Log) -> None:
    """torch_geometric: examples/mutag_gin.py, graphs of many sizes in batches, batch norm, global sums."""
    geometric = package("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = geometric.GIN(16, 64, 5, dropout=0.5, jk=None)
            self.classifier = geometric.MLP([64, 64, 2], norm="batch_norm", dropout=0.5)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
            x = self.gnn(x, edge_index)
            x = geometric.global_add_pool(x, batch, size=batch_size)
            return self.classifier(x)

    data, loader = package("torch_geometric.data").Data, package("torch_geometric.loader").DataLoader
    graphs = []
    for _ in range(140):
        nodes = int(torch.randint(20, 60, ()))
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        graphs.append(data(x=torch.rand(nodes, 16), edge_index=edges, y=torch.randint(0, 2, (1,))))
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimize(model, optimizer=optimizer)
    for _ in range(3):
        model.train()
        for batch in loader(graphs, batch_size=40, shuffle=True):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index, batch.batch, batch.num_graphs)
            loss = F.cross_entropy(out, batch.y)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            model(batch.x, batch.edge_index, batch.batch, batch.num_graphs).argmax(dim=-1)
        log()


def ppo(optimize: Optimize, log: Log) -> None:
    """cleanrl/ppo.py: trains by a method of the model, and never by its forward, for which memopt warns: "optimise the
    submodule that is called"; that is done here, with two lines."""
    package("gymnasium")
    names = definitions("cleanrl", "cleanrl/ppo.py")
    space = SimpleNamespace(shape=(8,)), SimpleNamespace(n=4)
    agent = names.Agent(SimpleNamespace(single_observation_space=space[0], single_action_space=space[1]))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    optimize(agent.actor, optimizer=optimizer)
    optimize(agent.critic, optimizer=optimizer)
    for _ in range(2):
        observations, advantages, returns = torch.rand(2048, 8), torch.randn(2048), torch.randn(2048)
        with torch.no_grad():
            actions, log_probabilities, _, _ = agent.get_action_and_value(observations)
        log()
        indices = numpy.arange(2048)
        numpy.random.shuffle(indices)
        for start in range(0, 2048, 512):
            chosen = indices[start : start + 512]
            _, new_log, entropy, value = agent.get_action_and_value(observations[chosen], actions.long()[chosen])
            ratio = (new_log - log_probabilities[chosen]).exp()
            scaled = (advantages[chosen] - advantages[chosen].mean()) / (advantages[chosen].std() + 1e-8)
            policy = torch.max(-scaled * ratio, -scaled * torch.clamp(ratio, 0.8, 1.2)).mean()
            value_loss = 0.5 * ((value.view(-1) - returns[chosen]) ** 2).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            log(policy=policy, value=value_loss)


def nerf(optimize: Optimize, log: Log) -> None:
    """run_nerf.py: a coarse and a fine network in one optimiser, each called once a step by its renderer."""
    names = definitions("nerf-pytorch", "run_nerf.py", device="cpu", DEBUG=False)
    settings = SimpleNamespace(
        multires=10, i_embed=0, use_viewdirs=True, multires_views=4, N_importance=32, netdepth=8, netwidth=64,
        netdepth_fine=8, netwidth_fine=64, netchunk=65536, lrate=5e-4, basedir="", expname="", ft_path="none",
        no_reload=True, perturb=1.0, N_samples=32, white_bkgd=False, raw_noise_std=0.0, dataset_type="blender",
        lindisp=False, no_ndc=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        render, _, _, _, optimizer = names.create_nerf(settings)
    optimize(render["network_fn"], optimizer=optimizer)
    optimize(render["network_fine"], optimizer=optimizer)
    camera = numpy.array([[50.0, 0, 16], [0, 50.0, 16], [0, 0, 1]])
    for step in range(9):
        rays, target = torch.rand(2, 128, 3), torch.rand(128, 3)
        rgb, _, _, extras = names.render(
            32, 32, camera, chunk=32768, rays=rays, retraw=True, near=2.0, far=6.0, **render
        )
        optimizer.zero_grad()
        loss = names.img2mse(rgb, target) + names.img2mse(extras["rgb0"], target)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * 0.1 ** (step / 250000)
        log(loss=loss)


def tabnet(optimize: Optimize, log: Log) -> None:
    """pytorch_tabnet/abstract_model.py: ghost batch norm, sparsemax by a function of its own, gradients set to None."""
    package("sklearn")
    network = imported("tabnet", "pytorch_tabnet.tab_network").TabNet(
        24, 3, n_d=16, n_a=16, n_steps=3, virtual_batch_size=64, momentum=0.02,
        group_attention_matrix=torch.eye(24), mask_type="sparsemax",
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    optimize(network, optimizer=optimizer)
    for rows, labels in epochs(batches(torch.rand(600, 24), torch.randint(0, 3, (600,)), size=256), 9):
        network.train()
        for param in network.parameters():
            param.grad = None
        output, sparsity = network(rows)
        loss = F.cross_entropy(output, labels) - 1e-3 * sparsity
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        log(loss=loss)


def diffusion(optimize: Optimize, log: Log) -> None:
    """denoising_diffusion_pytorch's own Trainer runs itself: accelerate, two batches a step, an average of weights."""
    package("torchvision")
    names = imported("denoising-diffusion-pytorch", "denoising_diffusion_pytorch")
    space = names.Trainer.__init__.__globals__
    space["cpu_count"] = lambda: 0  # workers of the loader
    model = names.GaussianDiffusion(names.Unet(dim=16, dim_mults=(1, 2)), image_size=32, timesteps=100)
    image = package("PIL.Image")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(100):
            pixels = numpy.random.randint(0, 255, (32, 32, 3), dtype=numpy.uint8)
            image.fromarray(pixels).save(Path(folder) / f"{number}.png")
        trainer = names.Trainer(
            model, folder, train_batch_size=8, gradient_accumulate_every=2, train_lr=8e-5, train_num_steps=6,
            save_and_sample_every=1000, results_folder=folder, calculate_fid=False,
        )  # fmt: skip
        optimize(model, optimizer=trainer.opt.optimizer)
        losses: list[Tensor] = []
        trainer.model.register_forward_hook(lambda module, args, loss: losses.append(loss.detach()))
        trainer.opt.optimizer.register_step_post_hook(lambda *_: log(loss=losses[-1]))
        random.seed(0)
        trainer.train()


def timesnet(optimize: Optimize, log: Log) -> None:
    """exp/exp_long_term_forecasting.py: periods chosen by the values of a transform, read as numbers in each block."""
    _forecast("TimesNet", optimize, log)


def autoformer(optimize: Optimize, log: Log) -> None:
    """exp/exp_long_term_forecasting.py: delays chosen by the values of a correlation."""
    _forecast("Autoformer", optimize, log)


def _forecast(name: str, optimize: Optimize, log: Log) -> None:
    package("einops")
    configs = SimpleNamespace(
        task_name="long_term_forecast", seq_len=48, label_len=24, pred_len=24, top_k=3, d_model=32, d_ff=32,
        num_kernels=4, e_layers=2, d_layers=1, enc_in=5, dec_in=5, c_out=5, embed="timeF", freq="h", dropout=0.1,
        n_heads=4, factor=3, moving_avg=25, activation="gelu",
    )  # fmt: skip
    model = imported("Time-Series-Library", f"models.{name}").Model(configs)
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=1e-4), nn.MSELoss()
    optimize(model, optimizer=optimizer)
    series, marks = torch.randn(36, 72, 5).cumsum(1), torch.randn(36, 72, 4)
    model.train()
    for batch, mark in epochs(batches(series, marks, size=16), 8):
        optimizer.zero_grad()
        decoder = torch.cat([batch[:, 24:48], torch.zeros_like(batch[:, -24:])], dim=1)
        outputs = model(batch[:, :48], mark[:, :48], decoder, mark[:, 24:])[:, -24:]
        loss = criterion(outputs, batch[:, -24:])
        loss.backward()
        optimizer.step()
        log(loss=loss)


def egnn(optimize: Optimize, log: Log) -> None:
    """denoise.py: coordinates and features of points, nearest neighbours by values, a loss where the mask is true."""
    package("einops")
    model = imported("egnn-pytorch", "egnn_pytorch.egnn_pytorch").EGNN_Network(
        num_tokens=21,
        num_positions=96,
        depth=3,
        dim=32,
        num_nearest_neighbors=16,
        norm_coors=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for step in range(8):
        length = 64 + 8 * (step % 3)
        tokens, coords, masks = (
            torch.randint(0, 21, (2, length)),
            torch.randn(2, length, 3),
            torch.rand(2, length) > 0.1,
        )
        noised = coords + torch.randn_like(coords)
        _, denoised = model(tokens, noised, mask=masks)
        loss = F.mse_loss(denoised[masks], coords[masks])
        (loss / 2).backward()
        if step % 2:
            optimizer.step()
        log(loss=loss)
        if step % 2:
            optimizer.zero_grad()


def tacotron2(optimize: Optimize, log: Log) -> None:
    """train.py: packed texts through an LSTM, a decoder's loop over frames with attention, batches of other lengths."""
    names = definitions("tacotron2", "model.py")
    vars(names).update(_tacotron_helpers())
    settings = SimpleNamespace(
        mask_padding=True, fp16_run=False, n_mel_channels=20, n_frames_per_step=1, n_symbols=40,
        symbols_embedding_dim=48, encoder_kernel_size=5, encoder_n_convolutions=2, encoder_embedding_dim=48,
        decoder_rnn_dim=64, prenet_dim=32, max_decoder_steps=100, gate_threshold=0.5, p_attention_dropout=0.1,
        p_decoder_dropout=0.1, attention_rnn_dim=64, attention_dim=32, attention_location_n_filters=8,
        attention_location_kernel_size=11, postnet_embedding_dim=48, postnet_kernel_size=5, postnet_n_convolutions=3,
    )  # fmt: skip
    model, criterion = names.Tacotron2(settings), imported("tacotron2", "loss_function").Tacotron2Loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    optimize(model, optimizer=optimizer)
    model.train()
    for step in range(8):
        frames, letters = (24, 20, 28)[step % 3], (16, 12, 14)[step % 3]
        text_lengths = torch.tensor([letters, letters - 2, letters - 5, letters - 6])
        mel_lengths = torch.tensor([frames - 3, frames, frames - 5, frames - 8])
        texts, mels, gates = torch.randint(1, 40, (4, letters)), torch.randn(4, 20, frames), torch.zeros(4, frames)
        model.zero_grad()
        x, y = model.parse_batch((texts, text_lengths, mels, gates, mel_lengths))
        loss = criterion(model(x), y)
        loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=loss)


def _tacotron_helpers() -> dict[str, Any]:
    """Layers and functions of the model, from files that as a whole need packages for audio, and CUDA."""
    layers = definitions("tacotron2", "layers.py", librosa_mel_fn=None, STFT=None)

    def mask(lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)

    return {
        "ConvNorm": layers.ConvNorm,
        "LinearNorm": layers.LinearNorm,
        "to_gpu": lambda x: x,
        "get_mask_from_lengths": mask,
    }


def conformer(optimize: Optimize, log: Log) -> None:
    """README.md: convolutions with batch norms between attention over frames, a CTC loss outside, masks."""
    package("einops")
    encoder = imported("conformer", "conformer.conformer").Conformer(
        64, depth=3, dim_head=16, heads=4, ff_mult=2, conv_kernel_size=15, attn_dropout=0.1
    )
    model = nn.Sequential(nn.Linear(40, 64), encoder, nn.Linear(64, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for step in range(8):
        frames = (120, 100, 136)[step % 3]
        logits = model(torch.randn(4, frames, 40))
        loss = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), torch.randint(1, 30, (4, 12)), torch.full((4,), frames),
            torch.randint(6, 13, (4,)),
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
