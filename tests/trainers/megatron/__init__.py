"""The Megatron trainer on gloo ranks: forks of this process, where megatron-core is imported once and not changed."""

import tests.megatron  # noqa: F401
