"""Every command that a document prints is one that today's parsers, Makefile and scripts know.

A command is a line of an indented block or a span in backticks; "`COMMAND`, at COMMIT" names one that went.
"""

import argparse
import importlib
import re
import shlex

import pytest
from torch.distributed.run import get_args_parser

from torchrun import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("related/*/*.md")]
COMMAND = re.compile(r"([A-Z_]+=(\"[^\"]*\"|\S+) )*(python|torchrun|make|bash|0[1-7]_\w+\.py) .*")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
parse_known_args = argparse.ArgumentParser.parse_known_args


def commands_of(text: str) -> list[str]:
    joined = re.sub(r"\\\n *", "", text)
    lines = re.findall(r"^    (\S.*)$", joined, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`(?!,? at [0-9a-f]{7})", re.sub(r"\n {0,2}(?=\S)", " ", joined))
    return [command for line in lines + spans for command in line.split(" && ")
            if COMMAND.fullmatch(command) and ".py   " not in command]


COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())})


class Parsed(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_is_one_of_today(command, monkeypatch):
    def parse_alone(*given):
        _, unknown = parse_known_args(*given)
        assert not unknown
        raise Parsed

    words = shlex.split(re.sub(r" \.\.\.|[][]", "", command), comments=True)
    words = [word for word in words if not re.match("[A-Z_]+=", word)]
    if words[0] in ("make", "bash"):
        assert {*words[1:]} <= TARGETS if words[0] == "make" else (ROOT / words[1]).is_file()
        return
    words = words[1:] if words[0] == "python" else words
    launcher = words[:2] == ["-m", "torch.distributed.run"]
    if launcher or words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[2 if launcher else 1 :])
        words = [launched.training_script, *launched.training_script_args]
    words = words[1:] if words[0] == "-m" else words
    module = importlib.import_module(words[0].removesuffix(".py"))
    if not words[1:]:  # a program's name
        return
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_alone)
    with pytest.raises(Parsed):
        getattr(module, "parse", module.main)()
