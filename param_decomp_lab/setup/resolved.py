"""A configuration with what follows from it alone, worked out once for all that need it."""

from dataclasses import dataclass
from functools import cached_property

from param_decomp_jax.method.state import Decomposition
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.config.wrapper import DataFolders
from param_decomp_lab.setup.named_text import NamedText, named_text
from param_decomp_lab.setup.target_source import Source, target_source


@dataclass(frozen=True)
class ResolvedConfig:
    """``config``, and what it means. Each property is computed when it is first asked for."""

    config: RunConfig

    @cached_property
    def decomposition(self) -> Decomposition:
        """The method's settings."""
        return decomposition(self.config)

    @cached_property
    def text(self) -> NamedText | None:
        """What a run is to tokenize first; None where it reads rows of tokens that are there, and for a toy."""
        return named_text(self.config) if isinstance(self.config.method, LanguageModelFile) else None

    @property
    def data(self) -> DataFolders | None:
        """Folders of tokens: the wrapper's, or those that the text is tokenized into; None for plain files of rows."""
        return self.config.wrapper.data if self.text is None else self.text.folders

    @cached_property
    def target(self) -> Source:
        """Where the target comes from. Raises UserError as `target_source`."""
        return target_source(self.config)
