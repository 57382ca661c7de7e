"""README.md keeps its word: tables are those of the JSON files, paths exist, and the Python in it runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_kda.conversion.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_show_what_the_json_files_say():
    command = [sys.executable, "examples/readme_tables.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:examples|tests|modeling_kda|conversion)/[\w./]+", README)))
)
def test_paths_exist(path):
    assert (ROOT / path.rstrip(".")).exists()


def test_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    code = "\n".join(blocks).replace("examples/teacher", str(ROOT / "examples" / "teacher"))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The old man looked at the sea and")


def test_commands_exist_with_their_options():
    shell = "".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)).replace("\\\n", " ")
    commands = [line for line in shell.splitlines() if line.startswith("kda ")]
    assert len(commands) >= 5
    for command in commands:
        # raises SystemExit for an option that does not exist
        build_parser().parse_args(shlex.split(command, comments=True)[1:])
