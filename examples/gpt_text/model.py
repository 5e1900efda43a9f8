"""A small GPT-2 of Hugging Face that reads bytes. Its embedding is also the matrix of its last layer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4, use_cache=False,
                            bos_token_id=None, eos_token_id=None)
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids):
        return self.model(ids).logits


model = Logits
