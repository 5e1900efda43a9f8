"""What is exported computes what the module computes; anything else is refused in words, and nothing is written."""

import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from distgpipe_export import OPERATORS, ExportError, Unseen, compare, export  # noqa: E402


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
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.5), WithoutGradient(), nn.Linear(4, 2))
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
        total = sum(archive.stat().st_size for archive in archives)
        self.assertLess(total, 3_000_000, "the archives of the repository together: export narrower models")
        for archive in archives:
            with self.subTest(archive=archive.name):
                for text in (b'"stack_trace"', b"site-packages"):
                    self.assertNotIn(text, archive.read_bytes())

    def test_a_lost_backward_pass_is_noticed(self):
        self.refused(wrapped(lambda linear, x: Halved.apply(linear(x))), "the gradient of linear.bias differs")

    def test_a_lost_backward_pass_behind_zeros_is_noticed(self):
        # All gradients in front of a head of zeros are zero, whatever the export has lost.
        class Scaled(nn.Module):
            def __init__(self, scale):
                super().__init__()
                self.gamma = nn.Parameter(torch.full((3,), scale))

            def forward(self, x):
                return x * self.gamma

        def hidden(*zeros):
            return nn.Sequential(wrapped(lambda linear, x: Halved.apply(linear(x))), *zeros)

        head = nn.Linear(3, 2)
        nn.init.zeros_(head.weight)
        norm = nn.BatchNorm1d(3)
        nn.init.zeros_(norm.weight)
        for zeros in ([head], [Scaled(0.0)], [Scaled(1e-9)], [norm], [nn.LayerNorm(3), Scaled(0.0), head]):
            with self.subTest(zeros=zeros):
                self.refused(hidden(*zeros), "the gradient of 0.linear.")

    def test_weights_that_the_export_has_changed_are_noticed(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        inputs = (torch.randn(4, 3),)
        program = export(model, inputs)
        self.assertEqual(compare(model, program, inputs), [])
        with torch.no_grad():
            program.state_dict["2.weight"].add_(0.01)
        with self.assertRaisesRegex(ExportError, "differs from the module's"):
            compare(model, program, inputs)

    def test_an_output_that_differs_in_evaluation_is_noticed(self):
        # The graph of a training step has one of the two ways, so loss, gradients and buffers agree.
        class Doubled(nn.Module):
            def forward(self, x):
                return x if self.training else 2 * x

        self.refused(nn.Sequential(nn.Linear(3, 3), Doubled()), "the output in evaluation differs from the module's by up to")

    def test_buffers_that_the_export_changes_otherwise_are_noticed(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.1), nn.Tanh(), nn.Linear(4, 2))
        inputs = (torch.randn(4, 3),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Unseen)  # of a bias before a batch norm
            program = export(model, inputs)
        compare(model, program, inputs)
        norm = next(node for node in program.graph.nodes if node.target is torch.ops.aten.batch_norm.default)
        self.assertEqual((norm.args[5:7]), (True, 0.1), "in training, with this momentum")
        # Training and evaluation are the same otherwise, because only later steps show what a momentum is.
        norm.update_arg(6, 0.3)
        program.graph_module.recompile()
        with self.assertRaisesRegex(ExportError, "the buffer 1.running_mean differs from the module's"):
            compare(model, program, inputs)

    def test_gradients_that_are_not_numbers_show_nothing(self):
        class Root(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale, self.empty = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0))

            def forward(self, x):
                return x * self.scale.sqrt() + self.empty.sum()

        with self.assertWarnsRegex(Unseen, "nothing was compared of the gradients of scale, empty: they are zero, or not finite,"):
            export(Root(), (torch.rand(4, 3),))

    def test_parameters_without_gradient_are_named(self):
        class Unused(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.extra, self.fixed = nn.Linear(3, 4), nn.Linear(3, 3), nn.Linear(3, 3)
                self.fixed.requires_grad_(False)
                self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
                nn.init.zeros_(self.head.weight)

            def forward(self, x):
                return self.head(self.norm(self.linear(self.fixed(x))))

        model = Unused()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with self.assertWarnsRegex(Unseen, "nothing was compared of the gradients of linear.bias, extra.weight, extra.bias: they are"):
            program = export(model, (torch.randn(4, 3),))
        for state in (model.state_dict(), program.state_dict):
            self.assertTrue(all(torch.equal(before[name], tensor) for name, tensor in state.items()), "the weights stay")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Unseen)
            export(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), (torch.randn(4, 3),))

    def test_a_branch_on_values_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x) if x.sum() > 0 else x), "depends on the values of a tensor")

    def test_an_output_that_is_no_tensor_is_refused(self):
        self.refused(wrapped(lambda linear, x: {"logits": linear(x)}), "returns the tensor that the loss takes")

    def test_a_shape_that_depends_on_the_batch_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x).reshape(2, -1)[:, :6].repeat(2, 1)), "torch.export cannot export the module")

    def test_a_shape_that_depends_on_values_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x[x.sum(1) > -100])), "the shape of index in the module itself depends on")

    def test_other_rows_than_those_of_the_input_are_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x).sum(0)), "expected an output with 4 rows")

    def test_a_buffer_that_forward_changes_is_refused(self):
        model = wrapped(lambda linear, x: linear(x))
        model.register_buffer("calls", torch.zeros(1))
        model.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)
        self.refused(model, "forward changes the buffer calls")

    def test_what_distgpipe_would_refuse_is_refused_before_anything_is_written(self):
        class Cast(nn.Module):
            def forward(self, x):
                with torch.autocast("cpu"):
                    return torch.mm(x, x.t())[:, :1] + x

        rows = nn.Sequential(nn.Linear(3, 3), nn.Unflatten(1, (1, 3)))
        for model, words in [
            (nn.Sequential(nn.Linear(3, 3), Cast()), "1 uses wrap_with_autocast, which distgpipe does not run: leave torch.autocast out"),
            (nn.Linear(3, 3).bfloat16(), "weight is of torch.bfloat16"),
            (nn.Linear(3, 3).double(), "weight is of torch.float64"),
            (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)), "1 has momentum=None"),
            (nn.Sequential(*rows, nn.InstanceNorm1d(1, track_running_stats=True)), "2 is an instance norm with running statistics"),
            (wrapped(lambda linear, x: torch.erfinv(linear(x).tanh())), "uses the operator aten.erfinv.default"),
        ]:
            with self.subTest(words=words):
                self.refused(model, words)

    def test_a_number_that_depends_on_values_is_refused(self):
        self.refused(wrapped(lambda linear, x: linear(x) * linear(x).sum().item()), "depends on the values of a tensor; keep it a tensor")

    def test_an_operator_that_is_allowed_is_exported(self):
        model = wrapped(lambda linear, x: torch.erfinv(linear(x).tanh() * 0.5))
        export(model, (torch.randn(4, 3),), allowed=["erfinv.default"])

    def test_the_list_of_operators_is_distgpipes(self):
        source = pathlib.Path(__file__).resolve().parent.parent.parent / "crates/distgpipe-core/src/pt2/operators.rs"
        lists = re.findall(r"^const [A-Z_]+: &\[&str\] = &\[(.*?)\];$", source.read_text(), re.DOTALL | re.MULTILINE)
        self.assertEqual(sorted(re.findall(r'"(.+?)"', "".join(lists))), sorted(OPERATORS))

    def test_inputs_that_forward_does_not_take_are_refused(self):
        self.refused(nn.Embedding(3, 3), "forward fails with inputs of [4, 3] of torch.float32")
        self.refused(nn.Bilinear(3, 3, 3), "missing 1 required positional argument")

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
            self.assertNotIn("warning", done.stderr)
            normed = "from torch import nn\nmodel = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))\n"
            pathlib.Path(folder, "mine.py").write_text(normed)
            done = subprocess.run([*command, "5"], cwd=folder, env=environment, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("warning: nothing was compared of the gradients of 0.bias: they are zero", done.stderr)
            pathlib.Path(folder, "mine.py").write_text("from torch import nn\nmodel = nn.Linear(5, 2)\ntext = 'x'\nlayer = nn.Linear\n")
            for model, flags, said in [
                ("mine.py:model", ["five"], "--input five: expected sizes"),
                ("mine.py:model", ["0"], "--input 0: expected sizes"),
                ("mine.py:model", ["5:int64<0"], "--input 5:int64<0: expected sizes"),
                ("mine.py:model", ["5", "--output", "none/x.pt2"], "none/x.pt2: no such directory"),
                ("mine.py:other", ["5"], "mine.py has no other"),
                ("mine.py:text", ["5"], "expected text to be a torch.nn.Module"),
                ("mine.py:layer", ["5"], "layer: missing a required argument: 'in_features'; expected a module"),
                ("none.such:model", ["5"], "none.such: No module named 'none'"),
            ]:
                command[3] = model
                wrong = subprocess.run([*command, *flags], cwd=folder, env=environment, capture_output=True, text=True)
                self.assertNotEqual(wrong.returncode, 0)
                self.assertIn(said, wrong.stderr)
                self.assertNotIn("Traceback", wrong.stderr)


if __name__ == "__main__":
    unittest.main()
