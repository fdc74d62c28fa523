"""Drivers of public programs that train on texts."""

from __future__ import annotations

import contextlib
import io
import math
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.public.program import Log, Optimize, batches, definitions, epochs, imported, package


def word_lstm(optimize: Optimize, log: Log) -> None:
    """word_language_model/main.py: an LSTM whose state is carried over, weights moved by hand, clipping."""
    names = definitions("examples", "word_language_model/model.py")
    model = names.RNNModel("LSTM", 500, 64, 64, 2, 0.2)
    _words(model, 500, optimize, log)


def word_transformer(optimize: Optimize, log: Log) -> None:
    """word_language_model/main.py with --model Transformer: a mask that is made again where the length changes."""
    names = definitions("examples", "word_language_model/model.py")
    model = names.TransformerModel(500, 64, 2, 64, 2, 0.2)
    _words(model, 500, optimize, log, carries_state=False)


def _words(model: nn.Module, words: int, optimize: Optimize, log: Log, *, carries_state: bool = True) -> None:
    criterion, bptt, rate = nn.NLLLoss(), 35, 5.0
    source, validation = torch.randint(0, words, (35 * 4 + 20, 20)), torch.randint(0, words, (80, 10))
    optimize(model)

    def detached(hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(state.detach() for state in hidden)

    for _ in range(2):
        model.train()
        hidden = model.init_hidden(20) if carries_state else ()
        for i in range(0, len(source) - 1, bptt):
            length = min(bptt, len(source) - 1 - i)
            data, targets = source[i : i + length], source[i + 1 : i + 1 + length].view(-1)
            model.zero_grad()
            if carries_state:
                hidden = detached(hidden)
                output, hidden = model(data, hidden)
            else:
                output = model(data).view(-1, words)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-rate)
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            model(*([validation[:35], model.init_hidden(10)] if carries_state else [validation[:35]]))
        log()


def nanogpt(optimize: Optimize, log: Log) -> None:
    """train.py: its own groups of AdamW, four micro-steps, an estimate of the loss in eval mode, clipping."""
    names = imported("nanoGPT", "model")
    config = names.GPTConfig(block_size=64, vocab_size=512, n_layer=4, n_head=4, n_embd=96, dropout=0.1, bias=False)
    with contextlib.redirect_stdout(io.StringIO()):
        model = names.GPT(config)
        optimizer = model.configure_optimizers(1e-1, 6e-4, (0.9, 0.95), "cpu")
    optimize(model, optimizer=optimizer)
    data = torch.randint(0, 512, (4000,))

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - 64, (8,)).tolist()
        return torch.stack([data[i : i + 64] for i in starts]), torch.stack([data[i + 1 : i + 65] for i in starts])

    inputs, targets = batch()
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * (step + 1) / 4
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                model(*batch())
            model.train()
            log()
        for micro_step in range(4):
            _, loss = model(inputs, targets)
            loss = loss / 4
            inputs, targets = batch()
            loss.backward()
            if micro_step < 3:
                log(loss=loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=loss)
        optimizer.zero_grad(set_to_none=True)


def mingpt(optimize: Optimize, log: Log) -> None:
    """mingpt/trainer.py runs itself: its own optimiser is made after the one line, gradients are there in forwards."""
    package("torchvision")
    gpt, trainer = imported("minGPT", "mingpt.model").GPT, imported("minGPT", "mingpt.trainer").Trainer
    config = gpt.get_default_config()
    config.model_type, config.vocab_size, config.block_size = None, 128, 48
    config.n_layer, config.n_head, config.n_embd = 3, 3, 96
    texts = torch.randint(0, 128, (200, 49))
    settings = trainer.get_default_config()
    settings.device, settings.num_workers, settings.max_iters, settings.batch_size = "cpu", 0, 9, 16
    with contextlib.redirect_stdout(io.StringIO()):
        model = gpt(config)
        runner = trainer(settings, model, TensorDataset(texts[:, :-1], texts[:, 1:]))
        optimize(model)
        runner.set_callback("on_batch_end", lambda done: log(loss=done.loss))
        runner.run()


def nanochat(optimize: Optimize, log: Log) -> None:
    """scripts/base_train.py: Muon and AdamW in one optimiser of its own, two micro-steps, schedules of momentum."""
    os.environ["NANOCHAT_DTYPE"] = "float32"
    package("torchvision")
    names = imported("nanochat", "nanochat.gpt")
    config = names.GPTConfig(sequence_len=64, vocab_size=512, n_layer=4, n_head=4, n_kv_head=2, n_embd=128)
    with contextlib.redirect_stdout(io.StringIO()):
        model = names.GPT(config)
        model.init_weights()
        optimizer = model.setup_optimizer()
    optimize(model, optimizer=optimizer)
    for step in range(4):
        for _ in range(2):
            tokens = torch.randint(0, 512, (8, 65))
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / 2).backward()
            log(loss=loss)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 8)
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.02 * step
        optimizer.step()
        model.zero_grad(set_to_none=True)
        log()


def translation(optimize: Optimize, log: Log) -> None:
    """train.py: label smoothing outside of the model, padded batches of many lengths, its own scheduled optimiser."""
    names = definitions("attention-is-all-you-need-pytorch", "train.py")
    model = imported("attention-is-all-you-need-pytorch", "transformer.Models").Transformer(
        400, 400, src_pad_idx=1, trg_pad_idx=1, d_word_vec=64, d_model=64, d_inner=128, n_layers=2, n_head=4, d_k=16,
        d_v=16, n_position=60,
    )  # fmt: skip
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-09)
    optimizer = imported("attention-is-all-you-need-pytorch", "transformer.Optim").ScheduledOptim(adam, 2.0, 64, 40)
    optimize(model, optimizer=adam)
    for step in range(9):
        model.train()
        lengths = torch.randint(12, 40, (2,)).tolist()
        source, target = (torch.randint(2, 400, (length, 16)) for length in lengths)
        source[lengths[0] // 2 :, ::3] = 1
        target[lengths[1] // 2 :, ::4] = 1
        src_seq = names.patch_src(source, 1)
        trg_seq, gold = names.patch_trg(target, 1)
        optimizer.zero_grad()
        pred = model(src_seq, trg_seq)
        loss, _, _ = names.cal_performance(pred, gold, 1, smoothing=True)
        loss.backward()
        optimizer.step_and_update_lr()
        log(loss=loss)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                names.cal_performance(model(src_seq, trg_seq), gold, 1, smoothing=False)
            log()


def mamba(optimize: Optimize, log: Log) -> None:
    """model.py: a selective scan in a loop over positions, einsum by einops; the usual loop around it."""
    package("einops")
    names = imported("mamba-minimal", "model")
    model = names.Mamba(names.ModelArgs(d_model=48, n_layer=2, vocab_size=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for (tokens,) in epochs(batches(torch.randint(0, 128, (20, 25)), size=8), 8):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)


def clip(optimize: Optimize, log: Log) -> None:
    """open_clip_train/train.py: two towers and a scale, its own loss, the scale held below 100 after each step."""
    package("torchvision"), package("timm"), package("ftfy")
    names = imported("open_clip", "open_clip", within="src")
    model = names.CLIP(
        64, {"image_size": 32, "layers": 3, "width": 64, "patch_size": 4},
        {"context_length": 24, "vocab_size": 300, "width": 64, "heads": 4, "layers": 3}, output_dict=True,
    )  # fmt: skip
    groups = [
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    criterion = names.ClipLoss()
    optimize(model, optimizer=optimizer)
    model.train()
    for images, texts in epochs(batches(torch.rand(44, 3, 32, 32), torch.randint(0, 300, (44, 24)), size=16), 9):
        optimizer.zero_grad()
        losses = criterion(**model(images, texts), output_dict=True)
        total_loss = sum(losses.values())
        total_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=total_loss)
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))


def sentence_pairs(optimize: Optimize, log: Log) -> None:
    """sentence-transformers: its pooling and its MultipleNegativesRankingLoss, which calls the model twice a step."""
    losses, modules = package("sentence_transformers.losses"), package("sentence_transformers.models")
    transformers = package("transformers")
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    bert = transformers.BertModel(config)

    class Encoder(nn.Module):
        """The part of `models.Transformer` that runs in training, without a tokenizer."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = bert

        def forward(self, features: dict[str, Tensor], **_: object) -> dict[str, Tensor]:
            ids, mask = features["input_ids"], features["attention_mask"]
            states = self.auto_model(input_ids=ids, attention_mask=mask).last_hidden_state
            return {**features, "token_embeddings": states}

    model = package("sentence_transformers").SentenceTransformer(modules=[Encoder(), modules.Pooling(64)], device="cpu")
    loss_of = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    optimize(model, optimizer=optimizer)
    model.train()
    for step in range(9):
        pairs = [_texts(8 if step % 4 != 3 else 5, int(torch.randint(8, 25, ()))) for _ in range(2)]
        loss = loss_of(pairs, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=loss)
        optimizer.zero_grad()
        scheduler.step()


def _texts(number: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(number, length, dtype=torch.int64)
    mask[1::2, length // 2 :] = 0
    return {"input_ids": torch.randint(1, 300, (number, length)) * mask, "attention_mask": mask}


def llama2c(optimize: Optimize, log: Log) -> None:
    """train.py: the loss is returned and kept in the model as `last_loss`, accumulation, a rate for each step."""
    names = imported("llama2.c", "model")
    model = names.Transformer(
        names.ModelArgs(dim=96, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=512, max_seq_len=64)
    )
    optimizer = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), "cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimize(model, optimizer=optimizer)
    tokens = torch.randint(0, 512, (20, 65))
    for step, (batch,) in enumerate(epochs(batches(tokens, size=8), 8)):
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * (step + 1) / 8
        for micro in batch.split(4):
            model(micro[:, :-1].contiguous(), micro[:, 1:].contiguous())
            loss = model.last_loss
            loss = loss / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log(loss=loss)


def lora(optimize: Optimize, log: Log) -> None:
    """examples/NLG/src/gpt2_ft.py: low-rank layers by loralib, masked losses by token, accumulation."""
    imported("LoRA", "loralib")
    names = imported("LoRA", "model", within="examples/NLG/src")
    config = names.GPT2Config(
        vocab_size_or_config_json_file=512, n_positions=64, n_ctx=64, n_embd=96, n_layer=4, n_head=4, lora_attn_dim=4,
        lora_attn_alpha=32, lora_dropout=0.1,
    )  # fmt: skip
    model = names.GPT2LMModel(config)
    imported("LoRA", "loralib").mark_only_lora_as_trainable(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    optimize(model, optimizer=optimizer)
    model.train()
    for step, (batch,) in enumerate(epochs(batches(torch.randint(0, 512, (20, 49)), size=8), 8)):
        mask = (torch.arange(48) > 10).float().expand(len(batch), -1)
        _, loss = model(batch[:, :-1], lm_labels=batch[:, 1:].contiguous(), lm_mask=mask, label_smooth=0.1)
        loss = loss.mean()
        (loss / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        log(loss=loss)
        if step % 2:
            optimizer.zero_grad()


def performer(optimize: Optimize, log: Log) -> None:
    """README.md: random features redrawn after some steps, reversible layers by an autograd function of its own."""
    package("einops")
    model = imported("performer-pytorch", "performer_pytorch.performer_pytorch").PerformerLM(
        num_tokens=256, max_seq_len=128, dim=64, depth=3, heads=4, dim_head=16, reversible=True,
        feature_redraw_interval=3, rotary_position_emb=False, causal=False,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    model.train()
    for (tokens,) in epochs(batches(torch.randint(0, 256, (20, 128)), size=8), 8):
        loss = F.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(-1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        log(loss=loss)
