"""What is exported computes what the module computes; anything else is refused in words, and nothing is written."""

import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from distgpipe_export import ExportError, export  # noqa: E402


class Halved(torch.autograd.Function):
    """Passes half of the gradient on, which an export forgets."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class WithoutGradient(nn.Module):
    """Has a subgraph of its own in an export."""

    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().mean().sqrt()
        return x * scale


def wrapped(forward):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return forward(self.linear, x)

    return Wrapped()


class Export(unittest.TestCase):
    def refused(self, model, words):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt2")
            with self.assertRaises(ExportError) as refusal:
                export(model, (torch.randn(4, 3),), path)
            self.assertFalse(os.path.exists(path))
        self.assertIn(words, str(refusal.exception))

    def test_a_model_with_dropout_and_batch_norm_is_written_without_its_examples(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), WithoutGradient(), nn.Linear(4, 2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        example = torch.randn(4, 3)
        example[2, 1] = 123456.789
        private = [b'"stack_trace"', struct.pack("<f", 123456.789)]
        with tempfile.TemporaryDirectory() as folder:
            path, plain = os.path.join(folder, "model.pt2"), os.path.join(folder, "plain.pt2")
            export(model, (example,), path)
            torch.export.save(torch.export.export(model, (example,)), plain)
            content, unstripped = pathlib.Path(path).read_bytes(), pathlib.Path(plain).read_bytes()
        self.assertIn(b"torch.ops.aten.batch_norm.default", content)
        self.assertIn(b"wrap_with_set_grad_enabled", content)
        self.assertIn(b"model/extra/distgpipe_export", content, "the mark of an export that was compared")
        for text in private:
            self.assertIn(text, unstripped, "what a plain export has")
            self.assertNotIn(text, content)
        self.assertTrue(all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()))

    def test_no_archive_of_the_repository_has_paths_of_the_machine_that_wrote_it(self):
        # Graphs nested in a node once kept their stack traces.
        root = pathlib.Path(__file__).resolve().parent.parent.parent
        archives = sorted(root.glob("crates/*/tests/**/*.pt2"))
        self.assertGreaterEqual(len(archives), 16)
        for archive in archives:
            with self.subTest(archive=archive.name):
                for text in (b'"stack_trace"', b"site-packages"):
                    self.assertNotIn(text, archive.read_bytes())

    def test_a_lost_backward_pass_is_noticed(self):
        self.refused(wrapped(lambda linear, x: Halved.apply(linear(x))), "the gradient of linear.bias differs")

    def test_a_branch_on_values_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x) if x.sum() > 0 else x), "depends on the values of a tensor")

    def test_an_output_that_is_no_tensor_is_refused(self):
        self.refused(wrapped(lambda linear, x: {"logits": linear(x)}), "returns the tensor that the loss takes")

    def test_a_shape_that_depends_on_the_batch_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x).reshape(2, -1)[:, :6].repeat(2, 1)), "torch.export cannot export the module")

    def test_one_row_is_refused(self):
        with self.assertRaises(ExportError):
            export(nn.Linear(3, 3), (torch.randn(1, 3),))

    def test_the_command_writes_a_file_named_after_the_source(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "mine.py").write_text("from torch import nn\nmodel = nn.Linear(5, 2)\n")
            environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(__file__).resolve().parent.parent))
            command = [sys.executable, "-m", "distgpipe_export", "mine.py:model", "--input"]
            done = subprocess.run([*command, "5"], cwd=folder, env=environment, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("wrote mine.pt2: 12 parameters", done.stdout)
            self.assertTrue(os.path.exists(os.path.join(folder, "mine.pt2")))
            wrong = subprocess.run([*command, "five"], cwd=folder, env=environment, capture_output=True, text=True)
            self.assertNotEqual(wrong.returncode, 0)
            self.assertIn("--input five: expected sizes", wrong.stderr)


if __name__ == "__main__":
    unittest.main()
