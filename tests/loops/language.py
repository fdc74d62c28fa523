"""Training loops of language models."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loops.loop import Log, Optimize


class CausalSelfAttention(nn.Module):
    """Attention as nanoGPT writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k, q, v = (y.view(B, T, self.heads, C // self.heads).transpose(1, 2) for y in (k, q, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), CausalSelfAttention(width, heads), nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT: tied embeddings, and the loss only where there are targets."""

    def __init__(self, vocab: int, block_size: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt(optimize: Optimize, log: Log) -> None:
    """nanoGPT with an optimizer of its own (Muon for matrices, Adam for the rest): accumulation over microsteps,
    clipping, a warmed-up cosine, `estimate_loss` and `generate` between, and a resume in the middle."""

    class MuonAdam(torch.optim.Optimizer):
        """Keeps tensors beside its groups and state, as nanochat's does."""

        def __init__(self, groups: list[dict[str, Any]]) -> None:
            super().__init__(groups, defaults={})
            self._lr, self._steps = torch.tensor(0.0), torch.tensor(0.0)

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self._steps += 1
            for group in self.param_groups:
                self._lr.fill_(group["lr"])
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                        if not group["muon"]:
                            state["exp_avg_sq"] = torch.zeros_like(p)
                    state["exp_avg"].lerp_(p.grad, 0.1)
                    if group["muon"]:
                        update = self.newton_schulz(state["exp_avg"]) * max(1, p.size(0) / p.size(1)) ** 0.5
                    else:
                        state["exp_avg_sq"].lerp_(p.grad.square(), 0.05)
                        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                    p.sub_(self._lr * update)

        @staticmethod
        def newton_schulz(g: Tensor) -> Tensor:
            x = g / (g.norm() + 1e-7)
            x = x.T if g.size(0) > g.size(1) else x
            for _ in range(3):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            return x.T if g.size(0) > g.size(1) else x

    data = torch.randint(0, 128, (20_000,))

    def get_batch() -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data) - 64, (12,))
        return torch.stack([data[i : i + 64] for i in ix]), torch.stack([data[i + 1 : i + 65] for i in ix])

    def configure(model: nn.Module) -> MuonAdam:
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("h.")]
        rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and n.startswith("h."))]
        groups = [{"params": matrices, "lr": 0.01, "muon": True}, {"params": rest, "lr": 3e-3, "muon": False}]
        return MuonAdam(groups)

    checkpoint: dict[str, Any] = {}
    for iterations in (range(5), range(5, 9)):
        model = GPT(128, 64, 64, 3)
        optimizer = configure(model)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            checkpoint.clear()
        optimize(model, optimizer=optimizer)
        for it in iterations:
            for group in optimizer.param_groups:
                group["lr"] = (
                    (0.01 if group["muon"] else 3e-3) * min(1.0, (it + 1) / 3) * (1 + math.cos(it / 9 * math.pi)) / 2
                )
            optimizer.zero_grad(set_to_none=True)
            for _ in range(3):
                _, loss = model(*get_batch())
                (loss / 3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log(loss=loss)
            if it % 3 == 2:
                model.eval()
                with torch.no_grad():
                    assert torch.isfinite(model(*get_batch())[1])
                model.train()
        checkpoint = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
        del model, optimizer


def word_lstm(optimize: Optimize, log: Log) -> None:
    """Word-level LSTM, as in pytorch/examples: the state is carried from batch to batch and detached, the last piece of
    the text is shorter, parameters are stepped by hand after clipping, and the text is evaluated between epochs."""

    class RNNModel(nn.Module):
        def __init__(self, ntoken: int, ninp: int, nhid: int) -> None:
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, ninp)
            self.rnn, self.decoder = nn.LSTM(ninp, nhid, 2, dropout=0.2), nn.Linear(nhid, ntoken)
            self.ntoken, self.nhid = ntoken, nhid

        def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
            decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
            return F.log_softmax(decoded, dim=1), hidden

        def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
            weight = next(self.parameters())
            return weight.new_zeros(2, bsz, self.nhid), weight.new_zeros(2, bsz, self.nhid)

    def repackage(h: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(v.detach() for v in h)

    def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
        seq_len = min(35, len(source) - 1 - i)
        return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

    model = RNNModel(500, 64, 64)
    train_data, val_data = torch.randint(0, 500, (160, 40)), torch.randint(0, 500, (40, 10))
    criterion, lr = nn.NLLLoss(), 20.0
    optimize(model, optimizer=None)
    for _ in range(2):
        model.train()
        hidden: Any = model.init_hidden(40)
        for i in range(0, train_data.size(0) - 1, 35):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            output, _ = model(get_batch(val_data, 0)[0], model.init_hidden(10))
        lr /= 4.0


def distillation(optimize: Optimize, log: Log) -> None:
    """Distillation: the student learns from a larger teacher's logits and from the labels, through hidden
    states too; rows are padded to the longest of their batch."""
    teacher, student = GPT(256, 48, 96, 3).eval().requires_grad_(False), GPT(256, 48, 48, 2)

    class Student(nn.Module):
        def __init__(self, model: GPT) -> None:
            super().__init__()
            self.model, self.adapt = model, nn.Linear(48, 96)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.model.wte(ids) + self.model.wpe(torch.arange(ids.size(1)))
            for block in self.model.h:
                x = block(x)
            return self.model.lm_head(self.model.ln_f(x)), self.adapt(x)

    def teach(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = teacher.wte(ids) + teacher.wpe(torch.arange(ids.size(1)))
        for block in teacher.h:
            x = block(x)
        return teacher.lm_head(teacher.ln_f(x)), x

    model = Student(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    optimize(model, optimizer=optimizer)
    temperature = 2.0
    for step in range(10):
        length = (48, 40, 44, 33, 48)[step % 5]
        ids = torch.randint(0, 256, (24, length))
        with torch.no_grad():
            teacher_logits, teacher_hidden = teach(ids)
        logits, hidden = model(ids)
        soft = F.kl_div(
            F.log_softmax(logits / temperature, -1), F.softmax(teacher_logits / temperature, -1), reduction="batchmean"
        ) * temperature**2 / length  # fmt: skip
        hard = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = 0.5 * soft + 0.5 * hard + 0.1 * F.mse_loss(hidden, teacher_hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log(loss=loss, hard=hard)


class Experts(nn.Module):
    """Tokens go to their two best experts, as in Mixtral, and the balance of the load is kept for the loss."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        scores = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = torch.topk(scores, 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        share = mask.float().mean((1, 2))
        self.balance = len(self.experts) * (share * scores.mean(0)).sum()
        return out.view_as(x)


def mixture_of_experts(optimize: Optimize, log: Log) -> None:
    """A mixture of experts: tokens are routed by index to four experts, and a balance loss is added that the model
    returns beside its own; two microbatches are accumulated."""

    class MoE(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, width)
            self.blocks = nn.ModuleList(Block(width, 4, Experts(width, 4)) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
            return loss, sum(block.mlp.balance for block in self.blocks)

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimize(model, optimizer=optimizer)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(16):
            ids = torch.randint(0, 256, (16, 65))
            yield ids[:, :-1], ids[:, 1:]

    for number, (ids, labels) in enumerate(batches()):
        loss, balance = model(ids, labels)
        ((loss + 0.01 * balance) / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log(loss=loss, balance=balance)
            optimizer.zero_grad()
