"""The flags of mlx_lm's commands, each known here with its default or refused by name; and ours."""

import argparse
import re

import mlx_lm.server
import pytest
from mlx_lm import chat as mlx_lm_chat
from mlx_lm.generate import setup_arg_parser

from h2o_core import H2OConfig
from h2o_mlxlm.cli import chat, flags, generate, server

OURS = {"generate": generate, "chat": chat, "server": server}
# There it is a model on a hub.
OWN_DEFAULT = [("chat", "--model"), ("generate", "--model")]


class StoppedError(Exception):
    pass


def stop(parser):
    raise StoppedError(parser)


def servers():
    """The parser of mlx_lm.server, which makes it where it reads the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(StoppedError) as stopped:
            mlx_lm.server.main()
    return stopped.value.args[0]


THEIRS = {
    "generate": setup_arg_parser(),
    "chat": mlx_lm_chat.setup_arg_parser(),
    "server": servers(),
}
FLAGS = [(name, action) for name, p in THEIRS.items() for action in p._actions if action.dest != "help"]


def parser(name):
    commands = flags.Parser(prog="h2o-mlxlm").add_subparsers(parser_class=flags.Parser)
    OURS[name].add_to(commands)
    return commands.choices[name]


@pytest.mark.parametrize(("name", "theirs"), FLAGS, ids=lambda x: getattr(x, "dest", x))
def test_each_flag_of_mlx_lm_is_known_with_its_default_or_refused_by_name(name, theirs, capsys):
    ours = parser(name)
    for flag in theirs.option_strings:
        action = ours._option_string_actions[flag]
        if isinstance(action, flags._Refuse):
            with pytest.raises(SystemExit) as stopped:
                ours.parse_args([flag] if theirs.nargs == 0 else [flag, "4"])
            assert stopped.value.code == 2
            said = f"{flag} can't be used with an H2O cache: {flags.REFUSED[flag]}"
            assert said in re.sub(r"\s+", " ", capsys.readouterr().err)
        else:
            assert action.option_strings == theirs.option_strings
            assert (action.dest, action.nargs) == (theirs.dest, theirs.nargs)
            assert action.default == theirs.default or (name, flag) in OWN_DEFAULT


def test_only_flags_of_mlx_lm_are_refused_by_name():
    assert flags.REFUSED.keys() <= {flag for _, action in FLAGS for flag in action.option_strings}


@pytest.mark.parametrize("name", OURS)
def test_the_caches_flags_have_the_configurations_defaults(name):
    args = parser(name).parse_args([])
    assert flags.config_from(args, args.budget) == H2OConfig()


def test_what_mlx_lms_server_reads_of_refused_flags_has_its_default():
    args = parser("server").parse_args([])
    refused = {a.dest: a.default for name, a in FLAGS if name == "server" and a.option_strings[0] in flags.REFUSED}
    assert {"draft_model", "num_draft_tokens", "quantized_kv_start"} <= refused.keys()
    assert {dest: getattr(args, dest) for dest in refused} == refused
