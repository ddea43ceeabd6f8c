"""The faults that are put into the library by hand still apply."""

import pathlib

import pytest

from .mutants.listed import MUTANTS

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.path} {mutant.old[:30]}")
def test_a_mutant_applies(mutant):
    source = (HERE.parent / "eqx_ensemble" / mutant.path).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.path, "exec")
    assert mutant.new != mutant.old
    assert all((HERE / path.partition("::")[0]).exists() for path in mutant.tests.split())


def test_there_are_sixty_all_different():
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60
