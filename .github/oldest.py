"""Write a pip constraints file: each run-time dependency at the oldest release series that pyproject.toml allows."""

import re
import sys
from pathlib import Path

TEXT = (Path(__file__).parent.parent / "pyproject.toml").read_text()
LIST = re.search(r"^dependencies = \[(.*?)^\]", TEXT, re.S | re.M)
assert LIST, "pyproject.toml has no dependencies"
for name, version in re.findall(r'"([A-Za-z0-9_-]+)>=([0-9.]+)"', LIST[1]):
    series = version if version.count(".") > 1 else f"{version}.*"
    sys.stdout.write(f"{name}=={series}\n")
