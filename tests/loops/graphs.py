"""Training loops of graph networks; the graph is another one in each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loops.loop import Log, Optimize


def _molecules(generator: torch.Generator, graphs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes, edges, the graph of each node, and a target for each graph, as PyG batches them."""
    sizes = torch.randint(30, 60, (graphs,), generator=generator)
    starts = torch.cumsum(sizes, 0) - sizes
    x = torch.randn(int(sizes.sum()), 16, generator=generator)
    edges = [
        torch.randint(0, int(n), (2, 3 * int(n)), generator=generator) + s for n, s in zip(sizes, starts, strict=True)
    ]
    return (
        x,
        torch.cat(edges, 1),
        torch.repeat_interleave(torch.arange(graphs), sizes),
        torch.randn(graphs, 1, generator=generator),
    )


def gin(optimize: Optimize, log: Log) -> None:
    """GIN on batches of molecules: neighbours and graphs are summed by `index_add`; numbers of nodes and edges differ
    from batch to batch, and the last batch has fewer graphs."""

    class GINConv(nn.Module):
        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.eps = nn.Parameter(torch.zeros(1))
            self.mlp = nn.Sequential(
                nn.Linear(first, last), nn.BatchNorm1d(last), nn.ReLU(), nn.Linear(last, last), nn.ReLU()
            )

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            gathered = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            return self.mlp((1 + self.eps) * x + gathered)

    class GIN(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.convs = nn.ModuleList([GINConv(16, width), GINConv(width, width), GINConv(width, width)])
            self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 1))

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, graphs: int) -> Tensor:
            for conv in self.convs:
                x = conv(x, edge_index)
            pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
            return self.head(pooled)

    generator = torch.Generator().manual_seed(1)
    batches = [_molecules(generator, 48) for _ in range(5)] + [_molecules(generator, 21)]
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer)
    for _ in range(2):
        model.train()
        for x, edge_index, batch, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, edge_index, batch, len(y)), y)
            loss.backward()
            optimizer.step()
            log(loss=loss)
        model.eval()
        with torch.no_grad():
            x, edge_index, batch, y = batches[-1]
            assert model(x, edge_index, batch, len(y)).shape == y.shape


def gat(optimize: Optimize, log: Log) -> None:
    """GAT, with attention by scatter: a softmax over each node's edges (`scatter_reduce`, `scatter_add`), on
    subgraphs that are sampled anew in each step."""

    class GATConv(nn.Module):
        def __init__(self, first: int, heads: int, width: int) -> None:
            super().__init__()
            self.lin, self.heads, self.width = nn.Linear(first, heads * width, bias=False), heads, width
            self.att_src, self.att_dst = (nn.Parameter(0.1 * torch.randn(1, heads, width)) for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = self.lin(x).view(-1, self.heads, self.width)
            src, dst = edge_index
            alpha = F.leaky_relu((h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst], 0.2)
            index = dst.unsqueeze(-1).expand_as(alpha)
            highest = alpha.new_full((len(x), self.heads), -1e9).scatter_reduce(0, index, alpha.detach(), "amax")
            alpha = (alpha - highest[dst]).exp()
            total = alpha.new_zeros(len(x), self.heads).scatter_add(0, index, alpha)
            message = h[src] * (alpha / (total[dst] + 1e-16)).unsqueeze(-1)
            out = torch.zeros_like(h).scatter_add(0, dst.view(-1, 1, 1).expand_as(message), message)
            return out.flatten(1)

    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.last = GATConv(16, 4, 16), GATConv(64, 4, 16), nn.Linear(64, 7)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = F.dropout(F.elu(self.conv1(x, edge_index)), p=0.4, training=self.training)
            return self.last(F.elu(self.conv2(x, edge_index)))

    features, labels = torch.randn(3000, 16), torch.randint(0, 7, (3000,))
    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    optimize(model, optimizer=optimizer)
    for step in range(10):
        count = 900 + 37 * (step * 5 % 7)
        nodes = torch.randperm(3000)[:count]
        edge_index = torch.randint(0, count, (2, 5 * count + step))
        optimizer.zero_grad()
        out = model(features[nodes], edge_index)
        loss = F.cross_entropy(out[:200], labels[nodes[:200]])
        loss.backward()
        optimizer.step()
        log(loss=loss)


def gcn_sparse(optimize: Optimize, log: Log) -> None:
    """GCN by Kipf: a sparse normalised adjacency, another one in each step, multiplied with `torch.sparse.mm`."""

    class GraphConvolution(nn.Module):
        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(first, last) / first**0.5),
                nn.Parameter(torch.zeros(last)),
            )

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            return torch.sparse.mm(adj, x @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, width: int = 96) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [GraphConvolution(32, width), *(GraphConvolution(width, width) for _ in range(3))]
            )
            self.last = GraphConvolution(width, 7)

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.dropout(F.gelu(layer(x, adj)), 0.2, training=self.training)
            return F.log_softmax(self.last(x, adj), dim=1)

    def adjacency(nodes: int, edges: int) -> Tensor:
        index = torch.cat([torch.randint(0, nodes, (2, edges)), torch.arange(nodes).repeat(2, 1)], 1)
        adj = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (nodes, nodes)).coalesce()
        degree = torch.sparse.sum(adj, 1).to_dense()
        return torch.sparse_coo_tensor(adj.indices(), adj.values() / degree[adj.indices()[0]], adj.shape).coalesce()

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    optimize(model, optimizer=optimizer)
    for step in range(10):
        nodes = 1500 + 100 * (step % 3)
        x, adj, labels = torch.randn(nodes, 32), adjacency(nodes, 6 * nodes), torch.randint(0, 7, (nodes,))
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.nll_loss(output, labels)
        loss.backward()
        optimizer.step()
        log(loss=loss)
