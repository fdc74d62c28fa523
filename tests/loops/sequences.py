"""Training loops over sequences that are no text for language models: tags, speech, time series."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from tests.loops.loop import Log, Optimize


def tagging(optimize: Optimize, log: Log) -> None:
    """Sequence labelling: a bidirectional LSTM over packed sentences, whose longest differs from batch to batch; the
    last batch is smaller, and the rate falls where the loss on held-out sentences does not."""

    class Tagger(nn.Module):
        def __init__(self, words: int, tags: int) -> None:
            super().__init__()
            self.embedding, self.dropout = nn.Embedding(words, 64, padding_idx=0), nn.Dropout(0.3)
            self.lstm = nn.LSTM(64, 64, num_layers=2, bidirectional=True, batch_first=True)
            self.hidden2tag = nn.Linear(128, tags)

        def forward(self, sentences: Tensor, lengths: Tensor) -> Tensor:
            embedded = self.dropout(self.embedding(sentences))
            packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
            output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.hidden2tag(self.dropout(torch.tanh(output)))

    generator = torch.Generator().manual_seed(1)
    sentences = [
        torch.randint(1, 400, (int(n),), generator=generator) for n in torch.randint(8, 40, (90,), generator=generator)
    ]

    def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        words = pad_sequence(rows, batch_first=True)
        return words, torch.tensor([len(row) for row in rows]), (words % 9).masked_fill(words == 0, -100)

    model = Tagger(400, 9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    optimize(model, optimizer=optimizer)
    train = DataLoader(sentences[:80], batch_size=18, shuffle=True, collate_fn=collate)
    for _ in range(2):
        model.train()
        for words, lengths, tags in train:
            optimizer.zero_grad()
            scores = model(words, lengths)
            loss = F.cross_entropy(scores.flatten(0, 1), tags.flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            words, lengths, tags = collate(sentences[80:])
            held_out = F.cross_entropy(model(words, lengths).flatten(0, 1), tags.flatten(), ignore_index=-100)
        scheduler.step(held_out)


def speech_ctc(optimize: Optimize, log: Log) -> None:
    """Speech recognition in the manner of DeepSpeech 2: spectrograms of many lengths, convolutions, a GRU, CTC
    outside of the model; a one-cycle rate for each step."""

    class SpeechRecognition(nn.Module):
        def __init__(self, mels: int = 32, width: int = 64) -> None:
            super().__init__()
            self.cnn = nn.Conv2d(1, 16, 3, stride=2, padding=1)
            self.norms = nn.ModuleList(nn.LayerNorm(mels // 2) for _ in range(2))
            self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
            self.dense = nn.Linear(16 * mels // 2, width)
            self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
            self.classifier = nn.Sequential(
                nn.Linear(2 * width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 29)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.cnn(x)
            for norm, conv in zip(self.norms, self.convs, strict=True):
                y = norm(x.transpose(2, 3).contiguous()).transpose(2, 3).contiguous()
                x = x + conv(F.gelu(y))
            x = self.dense(x.flatten(1, 2).transpose(1, 2))
            return self.classifier(self.rnn(x)[0])

    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(60, 160, (44,), generator=generator).tolist()
    utterances = [(torch.randn(n, 32), torch.randint(1, 29, (n // 12,), generator=generator)) for n in frames]

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        spectrograms = pad_sequence([s for s, _ in rows], batch_first=True).unsqueeze(1).transpose(2, 3)
        labels = pad_sequence([label for _, label in rows], batch_first=True)
        return (
            spectrograms,
            labels,
            torch.tensor([len(s) // 2 for s, _ in rows]),
            torch.tensor([len(t) for _, t in rows]),
        )

    model = SpeechRecognition()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    criterion = nn.CTCLoss(blank=0)
    loader = DataLoader(utterances, batch_size=8, shuffle=True, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, steps_per_epoch=len(loader), epochs=2, anneal_strategy="linear"
    )
    optimize(model, optimizer=optimizer)
    for _ in range(2):
        for spectrograms, labels, input_lengths, label_lengths in loader:
            optimizer.zero_grad()
            output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
            loss = criterion(output, labels, input_lengths, label_lengths)
            loss.backward()
            optimizer.step()
            scheduler.step()
            log(loss=loss)


def times_net(optimize: Optimize, log: Log) -> None:
    """A forecaster in the manner of TimesNet: each block folds the series by its strongest periods, which are numpy
    values and change from batch to batch; the rate halves each epoch."""

    class TimesBlock(nn.Module):
        def __init__(self, width: int, k: int = 2) -> None:
            super().__init__()
            self.k = k
            self.conv = nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU(), nn.Conv2d(2 * width, width, 3, padding=1)
            )

        def forward(self, x: Tensor) -> Tensor:
            B, T, N = x.size()
            xf = torch.fft.rfft(x, dim=1)
            frequencies = abs(xf).mean(0).mean(-1)
            frequencies[0] = 0
            top = torch.topk(frequencies, self.k)[1].detach().cpu().numpy()
            periods, weight = T // top, abs(xf).mean(-1)[:, top]
            res = []
            for period in periods:
                length = T if T % period == 0 else (T // period + 1) * period
                out = torch.cat([x, torch.zeros([B, length - T, N])], dim=1) if length != T else x
                out = out.reshape(B, length // period, period, N).permute(0, 3, 1, 2).contiguous()
                out = self.conv(out).permute(0, 2, 3, 1).reshape(B, -1, N)
                res.append(out[:, :T, :])
            stacked = torch.stack(res, dim=-1)
            weight = F.softmax(weight, dim=1)[:, None, None, :]
            return (stacked * weight).sum(-1) + x

    class TimesNet(nn.Module):
        def __init__(self, channels: int = 7, width: int = 16) -> None:
            super().__init__()
            self.embedding, self.extend = nn.Conv1d(channels, width, 3, padding=1), nn.Linear(96, 144)
            self.model = nn.ModuleList(TimesBlock(width) for _ in range(2))
            self.layer_norm, self.projection = nn.LayerNorm(width), nn.Linear(width, channels)

        def forward(self, x: Tensor) -> Tensor:
            means = x.mean(1, keepdim=True).detach()
            x = x - means
            stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
            h = self.extend(self.embedding((x / stdev).transpose(1, 2))).transpose(1, 2)
            for block in self.model:
                h = self.layer_norm(block(h))
            return self.projection(h) * stdev + means

    series = torch.stack([torch.sin(torch.arange(400) * (0.1 + 0.07 * n)) for n in range(7)], 1) + 0.3 * torch.randn(
        400, 7
    )
    windows = [(series[i : i + 96], series[i + 96 : i + 144]) for i in range(0, 250, 2)]
    model = TimesNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    optimize(model, optimizer=optimizer)
    for epoch in range(2):
        for batch_x, batch_y in DataLoader(windows, batch_size=24, shuffle=True):
            optimizer.zero_grad()
            outputs = model(batch_x)[:, -48:, :]
            loss = criterion(outputs, batch_y)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5**epoch


def mamba(optimize: Optimize, log: Log) -> None:
    """A state-space model in the manner of mamba-minimal: the selective scan is a loop over the sequence in Python."""

    class MambaBlock(nn.Module):
        def __init__(self, width: int, inner: int, state: int = 8, rank: int = 4) -> None:
            super().__init__()
            self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
            self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
            self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
            self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(inner, 1)))
            self.D, self.split, self.inner = nn.Parameter(torch.ones(inner)), [rank, state, state], inner

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            x, res = self.in_proj(x).split([self.inner, self.inner], dim=-1)
            x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
            delta, B, C = self.x_proj(x).split(self.split, dim=-1)
            y = self.selective_scan(x, F.softplus(self.dt_proj(delta)), -torch.exp(self.A_log), B, C)
            return self.out_proj((y + x * self.D) * F.silu(res))

        def selective_scan(self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
            deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
            deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
            x, ys = torch.zeros_like(deltaA[:, 0]), []
            for i in range(u.shape[1]):
                x = deltaA[:, i] * x + deltaB_u[:, i]
                ys.append(torch.einsum("bdn,bn->bd", x, C[:, i]))
            return torch.stack(ys, dim=1)

    class Mamba(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.embedding = nn.Embedding(128, width)
            self.layers = nn.ModuleList(MambaBlock(width, 2 * width) for _ in range(2))
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.norm_f, self.lm_head = nn.RMSNorm(width), nn.Linear(width, 128, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = layer(norm(x)) + x
            return self.lm_head(self.norm_f(x))

    model = Mamba()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for _ in range(8):
        ids = torch.randint(0, 128, (16, 33))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
