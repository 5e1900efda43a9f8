"""The Python in the documentation is Python, and the commands of docs/models.md train a model."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch
from PIL import Image
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
BUILT = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"


def replaced(text, old, new):
    assert text.count(old) == 1, f"docs/models.md: expected {old!r} once in {text!r}"
    return text.replace(old, new)


class Docs(unittest.TestCase):
    def test_every_python_block_of_the_documentation_compiles(self):
        count = 0
        for page in sorted(DOCS.glob("**/*.md")):
            for block in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
                line = page.read_text().count("\n", 0, block.start()) + 1
                with self.subTest(page=page.name, line=line):
                    compile(block.group(1), f"{page.name}:{line}", "exec")
                count += 1
        self.assertGreaterEqual(count, 2, "docs/models.md has two")

    def test_the_five_minutes_of_the_page_about_models_end_in_loaded_weights(self):
        page = (DOCS / "models.md").read_text()
        commands = re.search(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE).group(1).splitlines()
        source = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE).group(1)
        self.assertEqual([command.split()[0] for command in commands], ["python3", "distgpipe", "distgpipe", "python3"])
        # Nothing is downloaded, the images are small, and there are only eight.
        source = replaced(source, 'weights="DEFAULT"', "weights=None")
        commands[0] = replaced(commands[0], "3,224,224", "3,64,64")
        commands[2] += " --batch 4 --chunks 2 --epochs 1 --lr 0.001 --device cpu --threads 1"
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), str(BUILT), os.environ["PATH"]])
        # The page installs the exporter with pip.
        environment = dict(os.environ, PATH=path, PYTHONPATH=str(ROOT / "python"))
        said = []
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "my.py").write_text(source)
            for index in range(8):
                image = folder / "photos" / ("train" if index < 6 else "test") / "ab"[index % 2] / f"{index}.png"
                image.parent.mkdir(parents=True, exist_ok=True)
                pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
                Image.fromarray(pixels.numpy()).save(image)
            for command in commands:
                done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
                self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
                said.append(done.stdout + done.stderr)
            trained = load_file(folder / "mine.safetensors")
        self.assertIn("wrote my.pt2: 11,181,642 parameters", said[0])
        self.assertIn("layer2", said[1])
        self.assertRegex(said[2], "epoch 1/1: loss .*; test loss ")
        # The last command has loaded them by name; here they must be what a step has left.
        self.assertTrue(all(tensor.isfinite().all() for tensor in trained.values()))
        self.assertEqual(trained["bn1.num_batches_tracked"].item(), 1)


if __name__ == "__main__":
    unittest.main()
