"""Imported once by the fork server of tests.engines.processes: what opening an engine would import otherwise."""

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

import slimecli.engines.embedded.engine
import slimecli.engines.embedded.server  # noqa: F401
