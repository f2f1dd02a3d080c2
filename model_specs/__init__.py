"""What every known model looks like: numbers with their source, one TOML file per family."""

if __name__ == "model_specs":  # the folder is part of slimecli; a second copy under its bare name would split its state
    raise ImportError("import this package as slimecli.model_specs")

from slimecli.model_specs.registry import families, from_config, get_spec, registry
from slimecli.model_specs.spec import Family, ModelSpec, RopeScaling

__all__ = ["Family", "ModelSpec", "RopeScaling", "families", "from_config", "get_spec", "registry"]
