"""``adapter_config.json``: honoured exactly as PEFT does, or refused by name.

Every field that PEFT's ``LoraConfig`` writes is in one of four sets: read here, refused when it is set (it changes
the result and is not built), without effect on inference, or checked by value. A key that no PEFT known here writes
is refused too, unless its value is null, false or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from punica_batch.errors import AdapterError

_MATCH_SECONDS = 1.0  # for one pattern and one module name: an honest one takes microseconds

HONOURED = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "base_model_name_or_path",
})  # fmt: skip

# What each one does to the answer, for the message.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA rescales the merged weight",
    "use_qalora": "QA-LoRA pools the input",
    "use_bdlora": "block-diagonal LoRA multiplies other shapes",
    "lora_bias": "it adds a bias to B",
    "modules_to_save": "it replaces whole base layers",
    "trainable_token_indices": "it replaces embedding rows",
    "target_parameters": "it adapts bare parameters",
    "layer_replication": "it repeats the model's layers",
    "alora_invocation_tokens": "aLoRA switches on inside the prompt",
    "megatron_config": "it needs Megatron's layers",
    "ensure_weight_tying": "it ties adapters of tied layers",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA truncates the base weights",
    "monteclora_config": "it samples the weights",
    "velora_config": "its tensors have no place here",
    "fan_in_fan_out": "it transposes the weights",
}

# They matter while training, or say where the adapter comes from.
NO_EFFECT = frozenset({
    "lora_dropout", "inference_mode", "auto_mapping", "peft_version", "revision", "runtime_config", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})  # fmt: skip

CHECKED = frozenset({"peft_type", "task_type", "bias", "init_lora_weights"})

# Initialisations that leave the base model as it is. All others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the
# first A and B from the base weights, so that the saved A and B answer rightly only on that changed base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")

_ALL_LINEAR = "all-linear"
_MAX_RANK = 1 << 20


@dataclass(frozen=True)
class LoraConfig:
    """The honoured part of one ``adapter_config.json``; names and meanings are PEFT's.

    ``target_modules`` is a set of names, or a string: a regular expression for the whole name, or ``all-linear``.
    ``rank_pattern`` and ``alpha_pattern`` keep the file's order: the first key that matches a module wins.
    """

    r: int
    lora_alpha: float
    target_modules: frozenset[str] | str
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: frozenset[str] | str | None = None
    layers_to_transform: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()
    base_model_name_or_path: str | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Reads a parsed ``adapter_config.json``. Raises ``AdapterError`` naming the field."""
        _refuse(raw)
        targets = raw.get("target_modules")
        if targets is None:
            raise AdapterError("target_modules is null; write the list of adapted modules")
        layers = raw.get("layers_to_transform")
        pattern = raw.get("layers_pattern")
        if isinstance(targets, str) and (layers is not None or pattern is not None):
            raise AdapterError("layers_to_transform and layers_pattern need target_modules to be a list, not a string")
        if pattern and layers is None:
            raise AdapterError("layers_pattern needs layers_to_transform")
        return cls(
            r=_rank("r", raw.get("r", 8)),
            lora_alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
            use_rslora=_bool("use_rslora", raw.get("use_rslora", False)),
            rank_pattern={k: _rank(f"rank_pattern[{k!r}]", v) for k, v in _patterns("rank_pattern", raw)},
            alpha_pattern={k: _number(f"alpha_pattern[{k!r}]", v) for k, v in _patterns("alpha_pattern", raw)},
            target_modules=_names("target_modules", targets),
            exclude_modules=_names("exclude_modules", raw.get("exclude_modules") or ()) or None,
            layers_to_transform=_layers(layers),
            layers_pattern=_layers_pattern(pattern),
            base_model_name_or_path=_base_model(raw.get("base_model_name_or_path")),
        )

    def targets(self, module_names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Adapted modules among ``module_names`` (all linear and embedding layers) → (rank, scale), as PEFT has it.

        The scale is alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732), from the module's own r and alpha.
        """
        ranks, alphas = _compile(self.rank_pattern), _compile(self.alpha_pattern)
        found = {}
        for name in self._matching(module_names):
            rank = _first(ranks, name, self.r)
            found[name] = rank, self._scale(rank, _first(alphas, name, self.lora_alpha))
        return found

    def warnings(self, module_names: Iterable[str]) -> list[str]:
        """What PEFT accepts although it is likely to be a mistake: patterns without effect or dependent on order."""
        names = list(module_names)
        adapted = list(self._matching(names))
        ranks, alphas = _compile(self.rank_pattern), _compile(self.alpha_pattern)
        found = [
            *_pattern_warnings("rank_pattern", ranks, adapted),
            *_pattern_warnings("alpha_pattern", alphas, adapted),
        ]
        if not isinstance(self.target_modules, str):
            idle = sorted(t for t in self.target_modules if not any(n == t or n.endswith(f".{t}") for n in names))
            if idle:
                found.append(f"target_modules that match no module: {_shorten(idle)}")
        if any(_first(alphas, name, self.lora_alpha) == 0 for name in adapted):
            found.append("lora_alpha is 0 for some modules: they answer as the base model does")
        return found

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _matching(self, module_names: Iterable[str]) -> Iterable[str]:
        exclude = self.exclude_modules
        is_excluded = _matcher(exclude) if exclude else lambda name: False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == _ALL_LINEAR:
            is_target = _is_inner_linear
        else:
            is_target = _matcher(self.target_modules)
        for name in module_names:
            if not is_excluded(name) and is_target(name) and self._in_layers(name):
                yield name

    def _in_layers(self, name: str) -> bool:
        """Whether ``layers_to_transform`` allows the module. PEFT lets a target written out in full always pass."""
        if not self.layers_to_transform or name in self.target_modules:
            return True
        prefixes = [rf"(?:^|.*?\.){p}" for p in self.layers_pattern] or [r".*?\.[^.]*"]
        for prefix in prefixes:
            match = _Pattern(rf"{prefix}\.(?P<idx>\d+)\.").match(name)
            if match:
                return int(match["idx"]) in self.layers_to_transform
        return False


class _Pattern:
    """A regular expression of an adapter's config. ``re`` would search a hostile one for ever, holding the
    interpreter; ``regex`` reads the same language and gives up in time.

    Matching raises ``AdapterError`` after ``_MATCH_SECONDS``.
    """

    def __init__(self, pattern: str) -> None:
        self._regex = regex.compile(pattern)

    def match(self, name: str, *, whole: bool = False) -> Any:
        search = self._regex.fullmatch if whole else self._regex.match
        try:
            return search(name, timeout=_MATCH_SECONDS)
        except TimeoutError:
            shown = self._regex.pattern[:100]
            raise AdapterError(
                f"adapter_config.json: the pattern {shown!r} takes too long to match; simplify it"
            ) from None


def _matcher(wanted: frozenset[str] | str) -> Any:
    """PEFT's rule for a name: a string must match it whole as a regular expression; a list holds names or endings."""
    if isinstance(wanted, str):
        pattern = _Pattern(wanted)
        return lambda name: pattern.match(name, whole=True)
    endings = tuple(f".{w}" for w in wanted)
    return lambda name: name in wanted or name.endswith(endings)


def _is_inner_linear(name: str) -> bool:
    """``all-linear``: every linear layer except the output layer; embeddings are not linear layers."""
    return name.rpartition(".")[2] not in ("embed_tokens", "lm_head")


def _compile(pattern: Mapping[str, Any]) -> list[tuple[str, _Pattern, Any]]:
    return [(key, _Pattern(rf"(.*\.)?({key})$"), value) for key, value in pattern.items()]


def _first(patterns: list[tuple[str, _Pattern, Any]], name: str, default: Any) -> Any:
    for _, pattern, value in patterns:
        if pattern.match(name):
            return value
    return default


def _pattern_warnings(title: str, patterns: list[tuple[str, _Pattern, Any]], adapted: list[str]) -> list[str]:
    if not patterns:
        return []
    idle = [key for key, pattern, _ in patterns if not any(map(pattern.match, adapted))]
    found = [f"{title} keys that match no adapted module: {_shorten(idle)}"] if idle else []
    for name in adapted:
        hits = [(key, value) for key, pattern, value in patterns if pattern.match(name)]
        if len({value for _, value in hits}) > 1:
            keys = _shorten([key for key, _ in hits])
            found.append(f"{title} keys {keys} all match {name} with different values; the first one is used")
            break
    return found


def _shorten(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(repr(n[:100]) for n in names[:count]) + more


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _refuse(raw: Mapping[str, Any]) -> None:
    for key, why in REFUSED.items():
        if not _is_unset(raw.get(key)):
            raise AdapterError(f"{key} is not supported ({why})")
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {_show(raw.get('peft_type'))} is not supported; only LORA is")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type {_show(raw['task_type'])} is not supported; only CAUSAL_LM is")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"bias {_show(raw['bias'])} is not supported; only 'none' is")
    init = raw.get("init_lora_weights")
    if not any(init is plain or (isinstance(plain, str) and init == plain) for plain in _PLAIN_INITS):
        raise AdapterError(
            f"init_lora_weights {_show(init)} is not supported: it changes the base weights; save the adapter again "
            "with path_initial_model_for_weight_conversion, which turns it into a plain one"
        )
    known = HONOURED | NO_EFFECT | CHECKED | REFUSED.keys()
    for key, value in raw.items():
        if key not in known and not _is_unset(value):
            raise AdapterError(f"unknown field {_show(key)}; remove it if it does not change the result")


def _show(value: Any) -> str:
    return repr(value)[:100]


def _rank(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{where} must be a positive whole number, not {_show(value)}")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise AdapterError(f"{where} must be a finite number, not {_show(value)}")
    return float(value)


def _bool(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AdapterError(f"{where} must be true or false, not {_show(value)}")
    return value


def _regex(where: str, value: str) -> str:
    try:
        regex.compile(value)
    except (regex.error, RecursionError, OverflowError) as exc:
        raise AdapterError(f"{where} {_show(value)} is not a regular expression: {exc}") from exc
    return value


def _names(where: str, value: Any) -> frozenset[str] | str:
    if isinstance(value, str):
        return _regex(where, value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return frozenset(value)
    raise AdapterError(f"{where} must be a list of names or a string, not {_show(value)}")


def _patterns(where: str, raw: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    value = raw.get(where) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{where} must map patterns to numbers, not be {_show(value)}")
    for key in value:
        _regex(where, f"(.*\\.)?({key})$")
    return value.items()


def _layers(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in layers):
        raise AdapterError(f"layers_to_transform must be layer numbers, not {_show(value)}")
    return frozenset(layers)


def _layers_pattern(value: Any) -> tuple[str, ...]:
    if not value:  # PEFT: none, or an empty one, means any
        return ()
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise AdapterError(f"layers_pattern must be a name or a list of names, not {_show(value)}")
    return tuple(_regex("layers_pattern", p) for p in patterns)


def _base_model(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
