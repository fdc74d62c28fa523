"""Training loops of surrogates of equations, of tables, and of agents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.loop import Log, Optimize


def fno(optimize: Optimize, log: Log) -> None:
    """A Fourier neural operator in two dimensions, with complex weights; relative L2 loss outside of the model, a
    step of the rate each epoch, and an error on held-out fields between epochs."""

    class SpectralConv2d(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.modes = modes
            self.weights1, self.weights2 = (
                nn.Parameter(torch.rand(width, width, modes, modes, dtype=torch.cfloat) / width**2) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            m, x_ft = self.modes, torch.fft.rfft2(x)
            out_ft = torch.zeros(*x.shape[:2], x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
            out_ft[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :m, :m], self.weights1)
            out_ft[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, -m:, :m], self.weights2)
            return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))

    class FNO2d(nn.Module):
        def __init__(self, modes: int = 6, width: int = 16, layers: int = 3) -> None:
            super().__init__()
            self.fc0 = nn.Linear(3, width)
            self.convs = nn.ModuleList(SpectralConv2d(width, modes) for _ in range(layers))
            self.ws = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
            self.fc1, self.fc2 = nn.Linear(width, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc0(torch.cat((x, self.get_grid(x.shape, x.device)), dim=-1)).permute(0, 3, 1, 2)
            for conv, w in zip(self.convs, self.ws, strict=True):
                x = F.gelu(conv(x) + w(x))
            return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 3, 1))))

        def get_grid(self, shape: torch.Size, device: torch.device) -> Tensor:
            batch, nx, ny = shape[0], shape[1], shape[2]
            gx = torch.linspace(0, 1, nx).reshape(1, nx, 1, 1).repeat(batch, 1, ny, 1)
            gy = torch.linspace(0, 1, ny).reshape(1, 1, ny, 1).repeat(batch, nx, 1, 1)
            return torch.cat((gx, gy), dim=-1).to(device)

    def relative(out: Tensor, y: Tensor) -> Tensor:
        out, y = out.reshape(len(out), -1), y.reshape(len(y), -1)
        return ((out - y).norm(dim=1) / y.norm(dim=1)).sum()

    x = torch.rand(72, 32, 32, 1)
    y = torch.sin(3 * x).cumsum(1) / 32
    model = FNO2d()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimize(model, optimizer=optimizer)
    for _ in range(2):
        model.train()
        for a, b in DataLoader(TensorDataset(x[:64], y[:64]), batch_size=12, shuffle=True):
            optimizer.zero_grad()
            loss = relative(model(a), b)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            relative(model(x[64:]), y[64:])


def pinn(optimize: Optimize, log: Log) -> None:
    """A PINN of first order (advection): the residual's derivatives are taken forwards, by `torch.func.jvp`,
    within the model's forward; boundary, start and residual have a loss each; collocation points are drawn anew
    in each step."""
    from torch.func import jvp

    class PINN(nn.Module):
        def __init__(self, width: int = 96) -> None:
            super().__init__()
            layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh())]
            self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *layers, nn.Linear(width, 1))

        def forward(self, points: Tensor, start: Tensor, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            along = torch.tensor([1.0, 0.5]).expand_as(points)  # u_t + 0.5 u_x
            _, residual = jvp(self.net, (points,), (along,))
            return {
                "residual": residual.square().mean(),
                "start": F.mse_loss(self.net(start), torch.sin(2 * torch.pi * start[:, 1:])),
                "boundary": F.mse_loss(self.net(left), self.net(right)),
            }

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    optimize(model, optimizer=optimizer)
    for _ in range(12):
        points, start, times = torch.rand(3000, 2), torch.rand(600, 2), torch.rand(400, 1)
        start[:, 0] = 0.0
        left, right = torch.cat([times, torch.zeros(400, 1)], 1), torch.cat([times, torch.ones(400, 1)], 1)
        losses = model(points, start, left, right)
        loss = losses["residual"] + 10 * losses["start"] + losses["boundary"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log(loss=loss, **losses)


def burgers(optimize: Optimize, log: Log) -> None:
    """A PINN of second order (Burgers' equation): the derivatives are taken backwards and one by one, by
    `autograd.grad` in the loop, `u_xx` of `u_x`; a second forward has the start."""
    from torch.autograd import grad

    width = 64
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for _ in range(8):
        x, t = (torch.rand(1000, 1, requires_grad=True) for _ in range(2))
        u = model(torch.cat([x, t], dim=1))
        u_x, u_t = (grad(u.sum(), by, create_graph=True)[0] for by in (x, t))
        u_xx = grad(u_x.sum(), x, create_graph=True)[0]
        residual = (u_t + u * u_x - 0.01 * u_xx).square().mean()
        start = torch.cat([torch.rand(200, 1), torch.zeros(200, 1)], dim=1)
        loss = residual + F.mse_loss(model(start), torch.sin(6 * start[:, :1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss, residual=residual)


def ft_transformer(optimize: Optimize, log: Log) -> None:
    """FT-Transformer on a table, as in rtdl: numbers and categories become tokens, ReGLU, no decay for some
    parameters; the last batch is smaller, and the best epoch's weights are kept and loaded back."""

    class Tokenizer(nn.Module):
        def __init__(self, numbers: int, categories: list[int], width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(numbers + 1, width) * width**-0.5)
            self.bias = nn.Parameter(torch.zeros(numbers + len(categories), width))
            offsets = torch.tensor([0, *categories[:-1]]).cumsum(0)
            self.register_buffer("category_offsets", offsets)
            self.category_embeddings = nn.Embedding(sum(categories), width)

        def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
            x_some = torch.cat([torch.ones(len(x_num), 1, device=x_num.device), x_num], dim=1)
            x = self.weight[None] * x_some[:, :, None]
            x = torch.cat([x, self.category_embeddings(x_cat + self.category_offsets[None])], dim=1)
            return x + torch.cat([torch.zeros(1, self.bias.shape[1], device=x.device), self.bias])[None]

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, 4, dropout=0.2, batch_first=True)
            self.linear0, self.linear1 = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm0(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            a, b = self.linear0(self.norm1(x)).chunk(2, dim=-1)
            return x + self.linear1(F.dropout(a * F.relu(b), 0.1, self.training))

    class FTTransformer(nn.Module):
        def __init__(self, width: int = 48) -> None:
            super().__init__()
            self.tokenizer = Tokenizer(10, [4, 7, 12], width)
            self.layers = nn.ModuleList(Layer(width) for _ in range(3))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

        def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
            x = self.tokenizer(x_num, x_cat)
            for layer in self.layers:
                x = layer(x)
            return self.head(F.relu(self.norm(x[:, 0]))).squeeze(-1)

    n = 1120
    x_num, x_cat = torch.randn(n, 10), torch.stack([torch.randint(0, k, (n,)) for k in (4, 7, 12)], 1)
    y = x_num[:, 0] * x_num[:, 1] + x_cat[:, 0]
    model = FTTransformer()
    no_decay = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name or "tokenizer" in name]
    rest = [p for p in model.parameters() if not any(p is q for q in no_decay)]
    optimizer = torch.optim.AdamW(
        [{"params": rest}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3, weight_decay=1e-5
    )
    optimize(model, optimizer=optimizer)
    best, best_state = float("inf"), {}
    for _ in range(2):
        model.train()
        for num, cat, target in DataLoader(
            TensorDataset(x_num[:1000], x_cat[:1000], y[:1000]), batch_size=192, shuffle=True
        ):
            optimizer.zero_grad()
            loss = F.mse_loss(model(num, cat), target)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.inference_mode():
            score = F.mse_loss(model(x_num[1000:], x_cat[1000:]), y[1000:]).item()
        if score < best:
            best, best_state = score, {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_state)


def ppo(optimize: Optimize, log: Log) -> None:
    """PPO in the manner of CleanRL: rollouts of many environments without gradients, then epochs of minibatches through
    `get_action_and_value`; a clipped objective, a value loss, an entropy; the rate is annealed."""

    class Agent(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()

            def mlp(last: int, std: float) -> nn.Sequential:
                layers = [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, last)]
                nn.init.orthogonal_(layers[-1].weight, std)
                return nn.Sequential(*layers)

            self.critic, self.actor_mean = mlp(1, 1.0), mlp(4, 0.01)
            self.actor_logstd = nn.Parameter(torch.zeros(1, 4))

        def forward(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
            mean = self.actor_mean(x)
            probs = torch.distributions.Normal(mean, self.actor_logstd.expand_as(mean).exp(), validate_args=False)
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    optimize(agent, optimizer=optimizer)
    environments, horizon, dynamics = 64, 48, 0.3 * torch.randn(4, 16)
    state = torch.randn(environments, 16)
    for update in range(3):
        optimizer.param_groups[0]["lr"] = (1 - update / 3) * 3e-4
        obs, actions, logprobs, rewards, values = [], [], [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                action, logprob, _, value = agent(state)
            obs.append(state)
            actions.append(action)
            logprobs.append(logprob)
            values.append(value.flatten())
            state = torch.tanh(state + action @ dynamics)
            rewards.append(-state.square().mean(1))
        with torch.no_grad():
            next_value, last, advantages = agent(state)[3].flatten(), torch.zeros(environments), []
            for t in reversed(range(horizon)):
                delta = rewards[t] + 0.99 * (values[t + 1] if t + 1 < horizon else next_value) - values[t]
                last = delta + 0.99 * 0.95 * last
                advantages.insert(0, last)
        b_obs, b_actions = torch.cat(obs), torch.cat(actions)
        b_logprobs, b_advantages = torch.cat(logprobs), torch.cat(advantages)
        b_returns = b_advantages + torch.cat(values)
        for _ in range(2):
            for mb in torch.randperm(environments * horizon).split(1280):
                _, newlogprob, entropy, newvalue = agent(b_obs[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                log(policy=pg_loss, value=v_loss)
