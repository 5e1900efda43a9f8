#!/usr/bin/env python3
"""Writes what Hugging Face's tokenizers produce for a few sentences, to test our use of them against.

usage: scripts/golden_tokens.py      needs: tokenizers==0.23.3
writes: crates/distgpipe/tests/golden/tokens.json, crates/distgpipe/tests/golden/tokenizer/

The tokenizer is of RoBERTa's kind (byte-level BPE, <s> a </s></s> b </s>) with a vocabulary of 400, trained on these sentences,
so that a clone can run the tests without RoBERTa's own files. With a folder as argument (vocab.json, merges.txt), this script
prints that tokenizer's results instead.
"""
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing

TARGET = Path(__file__).resolve().parent.parent / "crates/distgpipe/tests/golden"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SENTENCES = [
    "The more we study verbs, the crazier they get.",
    "Day by day the facts are getting murkier.",
    "No weapons were found in the country yet.",
    "The weather turned; we'll see whether they're right, won't we?",
    "",
    "  two  spaces, a\ttab and 1,234.5 numbers",
    "Naïve café – “quoted” 東京 🙂",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
]
PAIRS = [(0, None), (1, None), (4, None), (5, None), (6, None), (7, None), (0, 2), (2, 3), (7, 1), (1, 7), (7, 7), (4, 6)]
LENGTH = 32


def cases(tokenizer, length):
    sep, cls = (("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>")))
    tokenizer.post_processor = RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>", length=length)
    for a, b in PAIRS:
        a, b = SENTENCES[a], None if b is None else SENTENCES[b]
        encoding = tokenizer.encode(a) if b is None else tokenizer.encode(a, b)
        yield {"a": a, "b": b, "ids": encoding.ids, "mask": encoding.attention_mask}


if len(sys.argv) > 1:
    folder = Path(sys.argv[1])
    given = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    given.add_special_tokens([AddedToken(token, lstrip=token == "<mask>", special=True) for token in SPECIAL])
    print(json.dumps({"length": 128, "cases": list(cases(given, 128))}))
else:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(SENTENCES, vocab_size=400, min_frequency=1, special_tokens=SPECIAL, show_progress=False)
    (TARGET / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save_model(str(TARGET / "tokenizer"))
    golden = {"length": LENGTH, "cases": list(cases(tokenizer, LENGTH))}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(TARGET / "tokenizer" / "tokenizer.json"), pretty=False)
    (TARGET / "tokens.json").write_text(json.dumps(golden) + "\n")
    print(TARGET / "tokens.json")
