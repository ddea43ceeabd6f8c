"""Misspelt options and names: the error names the one that was meant, in every public function and package."""

import inspect
import pickle
import re
import types

import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee

from .test_docs import PUBLIC

FUNCTIONS = {path: fn for path, fn in PUBLIC.items() if isinstance(fn, types.FunctionType)}
CLASSES = {path: x for path, x in PUBLIC.items() if inspect.isclass(x) and "__init__" in vars(x)}
CLASSES = {path: x for path, x in CLASSES.items() if not issubclass(x, BaseException)}
PACKAGES = sorted({path.rpartition(".")[0] for path in PUBLIC})
STEP = ee.train.make_step(lambda model, batch, key: 0.0, optax.sgd(1.0))
LEAST = 5  # letters of a word of which two can be swapped so that it is still recognised


def swapped(word):
    """A word whose third and fourth letter have changed places; the next two letters that differ, if those do not."""
    i = next(i for i in range(2, len(word) - 1) if word[i] != word[i + 1])
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def american(word):
    """The American spelling."""
    word = re.sub("(optim|normal|random|standard|visual)is", r"\1iz", word)
    return word.replace("centre", "center")


def options(fn):
    named = [
        p.name for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return [name for name in named if len(name) >= LEAST]


@pytest.mark.parametrize("path", [path for path, fn in (FUNCTIONS | CLASSES).items() if options(fn)])
def test_the_option_that_was_meant_is_named(path):
    fn = PUBLIC[path]
    for option in options(fn):
        with pytest.raises(TypeError, match=rf"Did you mean .*`{option}`") as caught:
            fn(**{swapped(option): None})
        assert f"`{path.removeprefix('eqx_ensemble.')}`" in str(caught.value)
        if american(option) != option:
            with pytest.raises(TypeError, match=f"Did you mean `{option}`"):
                fn(**{american(option): None})


@pytest.mark.parametrize("package", PACKAGES)
def test_the_attribute_that_was_meant_is_named(package):
    module = __import__(package, fromlist=["_"])
    for path in (path for path in PUBLIC if path.rpartition(".")[0] == package):
        name = path.rpartition(".")[2]
        if len(name) >= LEAST:
            with pytest.raises(AttributeError, match=rf"Did you mean .*`{name}`"):
                getattr(module, swapped(name))
            if american(name) != name:
                with pytest.raises(AttributeError, match=f"Did you mean `{name}`"):
                    getattr(module, american(name))
    with pytest.raises(AttributeError, match=re.escape(f"module {package!r} has no attribute '__wrapped__'") + "$"):
        getattr(module, "__wrapped__")  # noqa: B009


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ee.fit(1, 2, 3, 4, optimizer=3), "`optimiser`"),
        (lambda: ee.fit(1, 2, 3, 4, max_epochs=3), "`epochs`"),
        (lambda: ee.build(3, n_estimators=3), "`num_members`"),
        (lambda: ee.predict(3, 4, seed=3), "`key`"),
        (lambda: ee.scores.nll(3, 4, mask=3), "`row_weights`"),
        (lambda: ee.conformal.split(3, 4, sample_weight=3), "`row_weights`"),
        (lambda: ee.conformal.split(3, 4, alpha=0.1), "`level`? It is the coverage, 1 - alpha."),
        (lambda: ee.Ensemble([3]), "`ee.stack(models)`"),
        (lambda: ee.fit(1, 2, 3, 4, Batch_Size=3), "`batch_size`"),
        (lambda: ee.build(3, n=3), "`num_members`"),
        (lambda: ee.predict(3, 4, training=True), "`inference`? It is the opposite"),
        (lambda: ee.fit(1, 2, 3, 4, validation_split=0.2), "`validation`? It takes the rows themselves"),
        (lambda: ee.fit(1, 2, 3, 4, score=max), "`validation`? The score is a part of it: `ee.train.Validation("),
        (lambda: ee.fit(1, 2, 3, 4, max_steps=3), "`stop`? It takes `ee.train.Stopping("),
        (lambda: ee.fit(1, 2, 3, 4, checkpoint_every=3), "`checkpoint`? It takes `ee.train.Checkpoint("),
        (lambda: ee.fit(1, 2, 3, 4, callback_every=3), "`callbacks`? Each may have its period: `ee.train.every("),
        (lambda: ee.fit(1, 2, 3, 4, scan=False), "`plan`? It is an option of the plan: `ee.plan.Vmap("),
        # Calls with too many arguments, or too few.
        (lambda: ee.fit(1, 2, 3, 4, 5), "`fit(ensemble, loss, optimiser, data, key=...)`; several arrays are one"),
        (lambda: ee.fit(1, 2, 3, 4), "'key'\nCall it as `fit(ensemble, loss, optimiser, data, key=...)`."),
        (lambda: ee.stack(3, 4), "Call it as `stack(models)`; several models are one argument, `models`."),
        (lambda: ee.map_members(out_axis=1), "`map_members(fn)`, or `@functools.partial(map_members, ...)`"),
        (lambda: ee.plot.prediction_bands(3, 4), "`plot.prediction_bands(predictions)`; other options go by name."),
        (lambda: STEP(1, 2, 3), "Call it as `step(state, batch)`; several arrays are one argument, `batch`."),
        (lambda: ee.train.fit, "`ee.fit`"),
        (lambda: ee.nll, "`ee.scores.nll`"),
        (lambda: ee.acuracy, "`ee.scores.accuracy`"),
        (lambda: ee.conformal.normalized, "`normalised`"),
        # Options that are passed on to another function.
        (lambda: ee.scores.per_member(ee.scores.nll, jnp.ones((2, 3, 2)), jnp.zeros(3, int), reduce=""), "`reduction`"),
        (lambda: ee.plot.risk_coverage(jnp.ones(5), jnp.ones(5), unti="x"), "`unit`"),
    ],
)  # fmt: skip
def test_words_of_other_libraries_and_other_places(call, meant):
    with pytest.raises((TypeError, AttributeError), match=re.escape(meant)):
        call()


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_public_function_is_serialised_by_its_public_name(path):
    fn = PUBLIC[path]
    assert f"{fn.__module__}.{fn.__qualname__}" == path
    assert pickle.loads(pickle.dumps(fn)) is fn


def test_errors_of_what_a_function_calls_are_left_alone():
    with pytest.raises(TypeError, match="^of the user's"):
        ee.scores.per_member(lambda *_, **__: raise_own(), jnp.ones((2, 3)), jnp.ones(3), optoin=3)


def raise_own():
    raise TypeError("of the user's")
