"""LoRA by PEFT: adapters of rank 8 on a Llama whose own weights are frozen, trained within a budget.

Weights are random, so that nothing is downloaded. `python examples/lora.py --small` takes seconds on a CPU; without
`--small` it has the shape of Llama-3.2-1B, for a card of 8 GB. Needs `pip install 'memopt[examples]'`.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memopt

SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}


def main() -> None:
    torch.manual_seed(0)
    small = "--small" in sys.argv
    sequences, length, budget_gb = (4, 128, 0.009) if small else (4, 1024, 7.5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        **(SMALL if small else LLAMA_1B), num_key_value_heads=2 if small else 8, vocab_size=256, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(device)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=3e-3)
    text = torch.frombuffer(bytearray(" ".join(topics.values()).encode()), dtype=torch.uint8).to(device)

    def batch() -> dict[str, torch.Tensor]:
        starts = torch.randint(len(text) - length, (sequences, 1), device=device)
        tokens = text[starts + torch.arange(length, device=device)].long()
        return {"input_ids": tokens, "labels": tokens}

    memopt.optimize(model, budget_gb, example_inputs=batch(), optimizer=optimizer)
    print(memopt.plan_of(model))

    for step in range(1, 5):
        given = batch()
        with memopt.measure_peak() as peak:
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.3f}  peak {peak.bytes / 1024**3:.4f} of {budget_gb} GB")


if __name__ == "__main__":
    main()
