"""Makes tiny models that speak a family's format without sense: `make_model.py SPECS`, run by the engine's Python.

Its weights are random but for one thing: each token is likely followed by a token that follows it in some example,
so what is sampled is made of the family's own pieces, now and then in the right order. SPECS is a file of JSON, a
list of `{"folder", "model_type", "config": {...}, "pairs": [[token, next], ...]}`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LIKELIHOOD = 18.0  # the logit of a token that follows; those of all others are about 0


def main(spec: dict) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(spec["model_type"], **spec["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.normal_()
        head = model.get_output_embeddings().weight
        head.normal_(std=0.02)
        for token, following in spec["pairs"]:
            head[following] += LIKELIHOOD / config.hidden_size * embedding[token]
        for name, weight in model.named_parameters():
            if "post_self_attn_layernorm" in name or "post_mlp_layernorm" in name:
                weight.fill_(0.02)  # of GLM: else its layers would drown the token that they began with
    model.save_pretrained(spec["folder"])


if __name__ == "__main__":
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        main(spec)
