"""The command line: each command does what the library call does, and a ValueError is one line and status 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_jax.__main__ import COMMANDS, main


def test_every_command_explains_itself(capsys):
    for module in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([module.__name__.rpartition(".")[2].replace("_", "-"), "--help"])
        assert ended.value.code == 0
        assert module.__doc__.partition("\n")[0] in " ".join(capsys.readouterr().out.split())


def test_generate_prints_prompt_and_continuation(capsys):
    assert main(["generate", "--prompt", "In the beginning", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out == "In the beginning of the\n"


@pytest.mark.slow
def test_generate_on_eight_devices_prints_the_text_of_one():
    """In processes of their own, as it is typed, to the default length."""
    line = [sys.executable, "-m", "kimi_jax", "generate", "--prompt", "In the beginning"]
    here = Path(__file__).parents[1]
    one, eight = (
        subprocess.run([*line, *layout.split()], cwd=here, capture_output=True, text=True, check=True).stdout
        for layout in ("", "--devices 8 --tp 1 --cp 8")
    )
    assert len(one) > 100
    assert eight == one


def test_plan_prints_bytes_and_json(capsys):
    assert main(["plan", "--config", "kimi-k3", "--cp", "16", "--context", "1048576", "--batch", "8", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)
    assert "110117616760" in text.replace(",", "")


def test_explain_names_what_a_change_of_layout_gains(capsys):
    assert main(["explain", "--config", "kimi-k3", "--cp", "16", "--diff", "1,16,shard"]) == 0
    assert "-681,246,720" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_is_one_line_and_status_2(capsys):
    assert main(["plan", "--config", "kimi-k3", "--cp", "3"]) == 2
    error = capsys.readouterr().err
    assert "tp * cp in {1, 2, 4, 8, 16, 32} is valid" in error
    assert error.count("\n") == 1


def test_a_prompt_that_cannot_be_read_prints_nothing_but_the_error(data, capsys):
    assert main(["generate", "--checkpoint", str(data / "kimi-k3-random"), "--prompt", "no tokenizer"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "has no tokenizer; give token ids" in said.err


def test_generate_takes_token_ids(models, capsys):
    ids = models("kimi-linear-tiny").tokenizer.encode("In the beginning")
    said = ",".join(map(str, ids))
    assert main(["generate", "--ids", said, "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out == f"{ids}  of the\n"


def test_plan_searches_a_layout_that_fits_or_says_that_none_does(capsys):
    sizes = ["--context", "131072", "--batch", "16"]
    assert main(["plan", "--fits", "H200", *sizes]) == 0
    text = capsys.readouterr().out
    assert text.startswith("H200: 138.00 GiB usable; batch 16, context 131,072, bfloat16") and "2 x 4" in text
    assert main(["plan", "--config", "kimi-k3", "--fits", "H100", "--max-ranks", "8"]) == 0
    assert capsys.readouterr().out == "no layout of up to 8 ranks fits H100 (78.00 GiB usable)\n"
    assert main(["plan", "--fits", "H200", "--max-ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["layout"]["tp"] * plan["layout"]["cp"] for plan in found] == [1, 2, 2]


def test_plan_compiles_the_step_and_says_whether_it_is_as_planned(data, capsys):
    folder = str(data / "kimi-linear-random")
    assert main(["plan", "--config", folder, "--cp", "2", "--context", "256", "--compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled"]["agrees"]


def test_explain_prints_text_and_json(capsys):
    assert main(["explain", "--tp", "2", "--cp", "4"]) == 0
    assert "mla.kv_a" in capsys.readouterr().out
    assert main(["explain", "--tp", "2", "--cp", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicated"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("convert {tiny} --dry-run --layout 1x99999", "tp=1 x cp=99999 does not fit"),
        ("plan --cp 1000000", "is valid up to 256 ranks"),
        ("plan --fits H200 --max-ranks 0", "max_ranks=0: a whole number of at least 1 is wanted"),
        ("explain --diff 2", "--diff 2: TP,CP or TP,CP,shard was wanted"),
        ("generate --prompt x --devices 0", "n=0 devices: wanted 1 or more"),
        ("generate --prompt x --checkpoint {tiny}/config.json", "config.json is a file: give the folder"),
        ("generate --prompt x --checkpoint absent", "absent: no such folder"),
        ("disk /absent --size 5MB --rounds 1", "/absent"),
        ("bench --scaling --prefill 8", "--scaling times decode steps of random weights"),
        ("bench --config kimi-k3-rank-slice --prefill 8", "times decode steps of random weights alone"),
        ("bench --context 100 --capacity 5", "capacity=5 is too small: context 100 and the timed steps need"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(tiny, capsys, line, message):
    assert main(line.format(tiny=tiny).split()) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
