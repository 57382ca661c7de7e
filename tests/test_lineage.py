"""The main example runs from start to end and writes what it says."""

import json
import os
import subprocess
import sys

import pytest
from conversion_helpers import ROOT

from modeling_kda import KDAForCausalLM

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("lineage")
    script = ROOT / "examples" / "lineage.py"
    command = [sys.executable, script, "--quick", "--stages", "softmax", "kda*3,softmax", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return output, json.loads((output / "lineage.json").read_text()), done.stdout


def test_the_identities_hold_and_are_all_there(results):
    identities = results[1]["identities"]
    assert len(identities) == 4 + 2 * 2 and all(value < 1e-9 for value in identities.values())
    assert identities["last layer converted: those below are untouched"] == 0.0


def test_the_rows_say_what_was_measured(results):
    _, found, printed = results
    softmax, hybrid = found["stages"]
    assert softmax["perplexity_at_conversion"] == pytest.approx(found["teacher"]["perplexity"]["perplexity"], rel=1e-5)
    assert softmax["healed"]["agreement"]["top1"] == 1.0 and softmax["new_parameters"] == 0
    assert hybrid["healed"]["model"]["stages"] == ["kda", "kda", "kda", "softmax"]
    kept = [row["healed"]["cache"]["by_formula"][-1]["bytes"] for row in (hybrid, softmax)]
    # one layer of four keeps its keys and values; the states of the others do not count for much at a million tokens
    assert kept[0] / kept[1] == pytest.approx(0.25, rel=1e-2)
    assert f"{hybrid['healed']['perplexity']['perplexity']:.1f}" in printed
    assert [entry["context"] for entry in hybrid["decode"]] == [64, 256]


def test_the_output_folder_is_complete(results):
    output = results[0]
    for name in ("cache_growth.png", "perplexity_ladder.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    assert "kda*3,softmax" in (output / "table.md").read_text()
    assert "[softmax]\nThe old man" in (output / "samples.txt").read_text()
    student = KDAForCausalLM.from_pretrained(output / "students" / "kda3-softmax" / "healed")
    assert student.config.stages[-1] == "softmax"
