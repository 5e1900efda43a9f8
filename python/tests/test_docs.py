"""The Python in the documentation is Python."""

import pathlib
import re
import unittest

DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"


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


if __name__ == "__main__":
    unittest.main()
