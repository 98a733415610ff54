"""adapter_config.json against PEFT itself: the same modules, ranks and scales, or a refusal by name."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from typing import Any

import pytest
import torch
from adapter_files import HIDDEN, INTERMEDIATE, LAYERS, MODULES, VOCAB, lora_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punica_batch.adapters import config as ours
from punica_batch.adapters.config import LoraConfig
from punica_batch.errors import AdapterError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def tiny_llama() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
                num_attention_heads=2, num_key_value_heads=1,
            )
        )  # fmt: skip


def peft_targets(**fields: Any) -> dict[str, tuple[int, float]] | None:
    """What PEFT adapts, or None where it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        except ValueError:
            return None
    return {
        name: (module.r["default"], module.scaling["default"])
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def our_targets(**fields: Any) -> dict[str, tuple[int, float]] | None:
    try:
        found = LoraConfig.from_dict(lora_config(**fields)).targets(MODULES)
    except AdapterError:
        return None
    return found or None  # PEFT refuses a config that adapts nothing


def test_modules_of_the_helper_are_the_models() -> None:
    found = {}
    for name, module in tiny_llama().named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, torch.nn.Embedding):
            found[name] = (module.embedding_dim, module.num_embeddings)
    assert found == MODULES


NAMES = [
    "q_proj", "v_proj", "self_attn.k_proj", "mlp.down_proj", "lm_head", "embed_tokens", "proj", "o_pro",
    "model.layers.1.self_attn.o_proj", "layers.0.mlp.up_proj", "model.layers.2.mlp.gate_proj", "1.self_attn.q_proj",
]  # fmt: skip
REGEXES = [
    "all-linear", "ALL-linear", r".*\.(q|v)_proj", r"model\.layers\.[02]\..*_proj", r".*mlp.*_proj", "q_proj",
    r"lm_head|.*gate_proj", r".*(embed_tokens|down_proj)", r"model\.layers\.1\.self_attn\.[qkvo]_proj",
]  # fmt: skip
PATTERNS = [
    "q_proj", "^q_proj", r"layers\.1\..*", "model.layers.0.self_attn.q_proj", r".*_proj", "nothing", "_proj",
    "self_attn.(k|v)_proj", "lm_head", "embed_tokens", r"model\.layers\.\d+\.mlp\..*", "q_proj|v_proj",
]  # fmt: skip


def pattern(values: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, int]]:
    return st.lists(st.tuples(st.sampled_from(PATTERNS), values), max_size=4).map(dict)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True)
    targets = draw(st.one_of(names, st.sampled_from(REGEXES)))
    fields: dict[str, Any] = {
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.integers(1, 33)),
        "use_rslora": draw(st.booleans()),
        "target_modules": targets,
        "exclude_modules": draw(st.one_of(st.none(), names, st.sampled_from(REGEXES[2:]))),
        "rank_pattern": draw(pattern(st.integers(1, 17))),
        "alpha_pattern": draw(pattern(st.integers(1, 65))),
    }
    if isinstance(targets, list) or draw(st.integers(0, 9)) == 0:
        fields["layers_to_transform"] = draw(
            st.one_of(st.none(), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3))
        )
        fields["layers_pattern"] = draw(
            st.sampled_from(
                [None, None, "layers", ["layers"], ["h", "layers"], "", [], [""], "layer", ".*", ["model.layers"]]
            )
        )
    return fields


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=configs())
def test_targets_ranks_and_scales_are_pefts(fields: dict[str, Any]) -> None:
    json_fields = json.loads(json.dumps(fields))
    expected = peft_targets(**fields)
    found = our_targets(**json_fields)
    assert (found is None) == (expected is None), (found, expected)
    if found is not None and expected is not None:
        assert found.keys() == expected.keys()
        for name, (rank, scale) in expected.items():
            assert found[name][0] == rank
            assert found[name][1] == pytest.approx(scale, rel=1e-12)


def test_a_wrong_scale_would_be_seen() -> None:
    """The oracle tells rsLoRA from plain scaling and one pattern order from the other."""
    plain = peft_targets(r=4, lora_alpha=16, target_modules=["q_proj"])
    rs = peft_targets(r=4, lora_alpha=16, target_modules=["q_proj"], use_rslora=True)
    name = "model.layers.0.self_attn.q_proj"
    assert plain is not None
    assert rs is not None
    assert plain[name] == (4, 4.0)
    assert rs[name] == (4, 16 / math.sqrt(4))
    first = LoraConfig.from_dict(lora_config(rank_pattern={"q_proj": 3, ".*_proj": 5})).targets(MODULES)
    second = LoraConfig.from_dict(lora_config(rank_pattern={".*_proj": 5, "q_proj": 3})).targets(MODULES)
    assert (first[name][0], second[name][0]) == (3, 5)


def test_every_field_of_the_installed_peft_is_classified() -> None:
    known = [ours.HONOURED, frozenset(ours.REFUSED), ours.NO_EFFECT, ours.CHECKED]
    assert sum(map(len, known)) == len(frozenset().union(*known)), "a field is classified twice"
    missing = {f.name for f in dataclasses.fields(peft.LoraConfig)} - frozenset().union(*known)
    assert not missing


def test_pefts_defaults_are_accepted(tmp_path: Any) -> None:
    peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    config = LoraConfig.from_dict(json.loads((tmp_path / "adapter_config.json").read_text()))
    assert config == LoraConfig(r=8, lora_alpha=8, target_modules=frozenset(["q_proj"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True), ("use_qalora", True), ("lora_bias", True), ("bias", "all"), ("bias", "lora_only"),
        ("bias", None), ("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1]),
        ("trainable_token_indices", {"embed_tokens": [1]}),
        ("target_parameters", ["mlp.weight"]), ("layer_replication", [[0, 2]]), ("alora_invocation_tokens", [1, 2]),
        ("megatron_config", {"a": 1}), ("ensure_weight_tying", True), ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}), ("monteclora_config", {"num_samples": 2}), ("velora_config", {"scale": 1}),
        ("use_bdlora", {"nblocks": 2}), ("fan_in_fan_out", True), ("peft_type", "LOHA"), ("peft_type", None),
        ("peft_type", "ADALORA"), ("task_type", "SEQ_CLS"), ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"), ("init_lora_weights", "olora"), ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", "tomorrow"),
        ("init_lora_weights", 1), ("a_new_option", 0.5), ("a_new_option", 0), ("a_new_option", {"a": None}),
        ("target_modules", None), ("target_modules", 3), ("target_modules", ["q_proj", 3]),
        ("target_modules", "(q_proj"),
        ("exclude_modules", "["), ("exclude_modules", 7), ("r", 0), ("r", -1), ("r", 2.5), ("r", True), ("r", "8"),
        ("r", 10**400), ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", math.nan), ("lora_alpha", math.inf),
        ("lora_alpha", 10**400), ("use_rslora", "true"), ("use_rslora", 1), ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 2}), ("rank_pattern", ["q_proj"]), ("alpha_pattern", {"q_proj": "4"}),
        ("layers_to_transform", ["1"]), ("layers_to_transform", [True]), ("layers_pattern", "layers"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterError, match=field) as caught:
        LoraConfig.from_dict(lora_config(**{field: value}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.1}, {"inference_mode": True}, {"peft_version": "0.21.2"}, {"revision": "main"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}, {"task_type": None},
        {"megatron_core": "megatron.core"},
        {"qalora_group_size": 16}, {"loftq_config": {"loftq_bits": 4}}, {"eva_config": {"rho": 2.0}},
        {"corda_config": {"corda_method": "ipm"}}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "eva"},
        {"init_lora_weights": False}, {"use_dora": None}, {"modules_to_save": []}, {"layer_replication": None},
        {"an_option_of_tomorrow": None}, {"an_option_of_tomorrow": False}, {"an_option_of_tomorrow": {}},
    ],
)  # fmt: skip
def test_what_does_not_change_the_answer_is_ignored(fields: dict[str, Any]) -> None:
    assert LoraConfig.from_dict(lora_config(**fields)) == LoraConfig.from_dict(lora_config())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_refused_initialisations_do_change_the_base_weights(init: str) -> None:
    linear = torch.nn.Sequential()
    linear.add_module("q_proj", torch.nn.Linear(6, 6, bias=False))
    before = linear.q_proj.weight.detach().clone()
    model = peft.get_peft_model(linear, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init))
    assert not torch.allclose(model.base_model.model.q_proj.base_layer.weight, before)


def test_warnings_name_patterns_without_effect_or_dependent_on_order() -> None:
    config = LoraConfig.from_dict(
        lora_config(
            target_modules=["q_proj", "c_attn"],
            rank_pattern={"v_proj": 4},
            alpha_pattern={"q_proj": 4, r"layers\.0\..*": 8},
        )
    )
    text = "\n".join(config.warnings(MODULES))
    assert "rank_pattern keys that match no adapted module: 'v_proj'" in text
    assert "target_modules that match no module: 'c_attn'" in text
    assert "alpha_pattern keys 'q_proj', 'layers" in text
    assert LoraConfig.from_dict(lora_config()).warnings(MODULES) == []
    assert "lora_alpha is 0" in LoraConfig.from_dict(lora_config(lora_alpha=0)).warnings(MODULES)[0]


SLOW = r"(\w|\.|[a-z])+[0-9]{2}"  # tries every way to read each letter


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": SLOW},
        {"exclude_modules": SLOW},
        {"rank_pattern": {SLOW: 4}},
        {"layers_to_transform": [0], "layers_pattern": SLOW},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_pattern_that_searches_for_ever_is_refused_in_time(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_MATCH_SECONDS", 0.05)
    config = LoraConfig.from_dict({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **changes})
    names = ["model.layers.0.self_attn.a_very_long_name_of_a_module_that_many_groups_can_share.q_proj"]
    with pytest.raises(AdapterError, match="takes too long to match"):
        config.targets(names)
