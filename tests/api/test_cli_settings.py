import dataclasses
import tomllib
from pathlib import Path

import pytest

from api.cli.errors import UsageError
from api.cli.options import ServeOptions
from api.cli.settings import check_keys, format_config, resolve


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "overwinter.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_nothing_given_means_the_defaults():
    assert resolve({}, {}, None) == dataclasses.replace(ServeOptions(), kv_memory=1 << 30)


def test_flag_over_environment_over_file_over_default(config):
    path = config("port = 1\nmax-queue = 1\nmax-num-seqs = 1\n")
    environ = {"OVERWINTER_PORT": "2", "OVERWINTER_MAX_QUEUE": "2"}
    options = resolve({"port": "3"}, environ, path)
    assert (options.port, options.max_queue, options.max_num_seqs) == (3, 2, 1)
    assert options.block_size == 16


def test_every_option_can_be_given_everywhere(config):
    values = {
        "model": ("some/dir", '"some/dir"', "some/dir"),
        "served_model_name": ("a,b", '["a", "b"]', ("a", "b")),
        "cache_dir": ("/c", '"/c"', Path("/c")),
        "host": ("::1", '"::1"', "::1"),
        "port": ("81", "81", 81),
        "api_key": ("k1, k2", '["k1", "k2"]', ("k1", "k2")),
        "admin_key": ("k3", '"k3"', "k3"),
        "device": ("cpu", '"cpu"', "cpu"),
        "dtype": ("float32", '"float32"', "float32"),
        "threads": ("2", "2", 2),
        "max_model_len": ("100", "100", 100),
        "block_size": ("4", "4", 4),
        "kv_memory": ("2MiB", '"2MiB"', 2 << 20),
        "max_num_seqs": ("5", "5", 5),
        "max_num_batched_tokens": ("6", "6", 6),
        "max_queue": ("7", "7", 7),
        "request_timeout": ("1.5", "1.5", 1.5),
        "cpu_tier": ("0", "0", 0),
        "disk_tier": ("/d", '"/d"', Path("/d")),
        "disk_tier_size": ("1GB", '"1GB"', 10**9),
        "disk_tier_ttl": ("86400", "86400", 86400.0),
        "disk_tier_optional": ("true", "true", True),
        "offload_prompt_only": ("1", "true", True),
        "verify_loads": ("0.25", "0.25", 0.25),
        "transcript_cache": ("off", '"off"', "off"),
        "load_policy": ("never", '"never"', "never"),
        "speculative": ("a.b:C", '"a.b:C"', "a.b:C"),
        "speculative_tokens": ("2", "2", 2),
        "speculative_depth": ("fixed", '"fixed"', "fixed"),
        "drain_timeout": ("0", "0", 0.0),
        "metrics_prefix": ("ow", '"ow"', "ow"),
        "log_level": ("debug", '"debug"', "debug"),
        "log_format": ("json", '"json"', "json"),
        "seed": ("9", "9", 9),
    }
    expected = ServeOptions(**{name: value for name, (_, _, value) in values.items()})
    left_out = {field.name for field in dataclasses.fields(ServeOptions)} - set(values)
    assert left_out == {"kv_blocks"}

    environ = {f"OVERWINTER_{name.upper()}": text for name, (text, _, _) in values.items()}
    assert resolve({}, environ, None) == expected
    for spell in (str, lambda name: name.replace("_", "-")):
        text = "".join(f"{spell(name)} = {toml}\n" for name, (_, toml, _) in values.items())
        assert resolve({}, {}, config(text)) == expected
    flags = {
        name: value if isinstance(value, bool | tuple) else text
        for name, (text, _, value) in values.items()
    }
    assert resolve(flags, {}, None) == expected
    masked = dataclasses.replace(expected, api_key=("********",) * 2, admin_key="********")
    assert resolve({}, {}, config(format_config(expected))) == masked


def test_the_printed_configuration_is_accepted_and_means_the_same(config):
    options = resolve(
        {"model": 'dir with "quotes" and \\', "cpu_tier": "1025", "disk_tier": "/x/é"}, {}, None
    )
    assert resolve({}, {}, config(format_config(options))) == options
    blocks = resolve({"kv_blocks": "12"}, {}, None)
    assert (blocks.kv_blocks, blocks.kv_memory) == (12, None)
    assert resolve({}, {}, config(format_config(blocks))) == blocks


def test_the_printed_configuration_hides_keys_and_the_mask_is_no_key(config):
    options = resolve({"api_key": ["secret-1", "secret-2"], "admin_key": "secret-3"}, {}, None)
    printed = format_config(options)
    assert "secret" not in printed
    assert tomllib.loads(printed)["api-key"] == ["********", "********"]
    assert tomllib.loads(printed)["admin-key"] == "********"
    masked = resolve({}, {}, config(printed))
    with pytest.raises(UsageError, match="--api-key is the mask that --print-config prints"):
        check_keys(masked)
    check_keys(options)
    only_admin = resolve({"api_key": ["k"]}, {}, config(printed))
    with pytest.raises(UsageError, match="--admin-key is the mask"):
        check_keys(only_admin)


def test_both_ways_to_size_the_pool_are_an_error_in_one_source(config):
    both = "--kv-memory and --kv-blocks exclude each other"
    with pytest.raises(UsageError, match=both):
        resolve({"kv_memory": "1GiB", "kv_blocks": "4"}, {}, None)
    with pytest.raises(UsageError, match=both):
        resolve({}, {"OVERWINTER_KV_MEMORY": "1GiB", "OVERWINTER_KV_BLOCKS": "4"}, None)
    with pytest.raises(UsageError, match=both):
        resolve({}, {}, config("kv-memory = 5\nkv-blocks = 4\n"))


def test_a_nearer_source_replaces_the_other_way_to_size_the_pool(config):
    options = resolve({"kv_blocks": "4"}, {}, config('kv-memory = "2GiB"\n'))
    assert (options.kv_blocks, options.kv_memory) == (4, None)
    options = resolve({"kv_memory": "1KiB"}, {"OVERWINTER_KV_BLOCKS": "4"}, None)
    assert (options.kv_blocks, options.kv_memory) == (None, 1024)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "OVERWINTER_MAX_NUM_SEQ",
            "unknown environment variable OVERWINTER_MAX_NUM_SEQ; "
            "did you mean OVERWINTER_MAX_NUM_SEQS?",
        ),
        ("OVERWINTER_ZZZZZZZZZZ", "unknown environment variable OVERWINTER_ZZZZZZZZZZ"),
    ],
)
def test_unknown_variables(variable, message):
    with pytest.raises(UsageError) as caught:
        resolve({}, {variable: "1", "PATH": "/bin"}, None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq = 1", "unknown key 'max-num-seq' in FILE; did you mean max-num-seqs?"),
        ("prot = 1", "unknown key 'prot' in FILE; did you mean port?"),
        ("[serve]\nport = 1", "unknown key 'serve' in FILE"),
        ("port = true", "'port' in FILE takes a number or a string, not True"),
        ("port = 70000", "'port' in FILE takes a whole number from 0 to 65535, not '70000'"),
        ("port = 1.0", "'port' in FILE takes a number or a string, not 1.0"),
        ('api-key = "k"', "'api-key' in FILE takes an array"),
        ("disk-tier-optional = 1", "'disk-tier-optional' in FILE takes true or false, not 1"),
        ('host = ""', "'host' in FILE must not be empty"),
        (
            "max-queue = 1\nmax_queue = 2",
            "'max_queue' in FILE is given twice, with - and with _: keep one of them",
        ),
    ],
)
def test_faults_in_the_file(config, text, message):
    path = config(text)
    with pytest.raises(UsageError) as caught:
        resolve({}, {}, path)
    assert str(caught.value).startswith(message.replace("FILE", str(path)))


def test_a_file_that_cannot_be_read(tmp_path, config):
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        resolve({}, {}, tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="is not valid TOML"):
        resolve({}, {}, config("port = = 1"))


def test_the_environment_may_name_the_file(config):
    assert resolve({}, {"OVERWINTER_CONFIG": str(config("port = 7"))}, None).port == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("threads", "0", "--threads takes a whole number from 1 up, not '0'"),
        ("threads", "1_0", "--threads takes a whole number from 1 up, not '1_0'"),
        ("dtype", "fp16", "--dtype takes one of auto, bfloat16, float16, float32, not 'fp16'"),
        ("drain_timeout", "nan", "--drain-timeout takes a number of seconds from 0 up, not 'nan'"),
        ("kv_memory", "1G", "--kv-memory takes a size such as 512MiB or 2GB, not '1G'"),
        ("metrics_prefix", "a:b", "--metrics-prefix takes letters, digits and underscores"),
        ("verify_loads", "1.01", "--verify-loads takes a number from 0 to 1, not '1.01'"),
        ("verify_loads", "-0.1", "--verify-loads takes a number from 0 to 1, not '-0.1'"),
        ("verify_loads", "nan", "--verify-loads takes a number from 0 to 1, not 'nan'"),
        ("api_key", [""], "--api-key must not be empty"),
        ("admin_key", "", "--admin-key must not be empty"),
    ],
)
def test_a_bad_value_names_its_flag(name, text, message):
    with pytest.raises(UsageError) as caught:
        resolve({name: text}, {}, None)
    assert str(caught.value).startswith(message)


def test_a_bad_value_names_its_variable():
    with pytest.raises(UsageError, match="OVERWINTER_PORT takes a whole number"):
        resolve({}, {"OVERWINTER_PORT": "http"}, None)
    with pytest.raises(UsageError, match="OVERWINTER_API_KEY must not be empty"):
        resolve({}, {"OVERWINTER_API_KEY": ""}, None)


def test_the_empty_string_unsets(config):
    path = config('disk-tier = "/d"\nseed = 3\n')
    options = resolve({"disk_tier": "", "seed": ""}, {}, path)
    assert (options.disk_tier, options.seed) == (None, None)
