"""Holds a configuration with everything that follows from it alone, computed once for all users."""

from dataclasses import dataclass
from functools import cached_property

from param_decomp_jax.method.state import Decomposition
from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.config.wrapper import DataFolders
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.named_text import NamedText, named_text, not_made
from param_decomp_lab.setup.rows import split_rows
from param_decomp_lab.setup.target_source import Source, target_source
from param_decomp_lab.weights.dtypes import Dtype


@dataclass(frozen=True)
class ResolvedConfig:
    """``config`` and what follows from it. Each property is computed on first access."""

    config: RunConfig

    @cached_property
    def decomposition(self) -> Decomposition:
        """The method's settings."""
        return decomposition(self.config)

    @cached_property
    def target(self) -> Source:
        """Where the target comes from. Raises UserError as `target_source` does."""
        return target_source(self.config)

    @property
    def weights_dtype(self) -> Dtype | None:
        """The dtype of the frozen weights on the devices; None keeps the stored dtype."""
        method = self.config.method
        return method.target.weights_dtype if isinstance(method, LanguageModelFile) else "float32"

    @property
    def mesh(self) -> MeshShape:
        """The mesh that the wrapper asks for."""
        m = self.config.wrapper.mesh
        return MeshShape(m.replica, m.fsdp, m.tensor, m.nodes)

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of a training batch: rows, and for a language model their positions."""
        method = self.config.method
        rows = method.pd.batch_size
        return (rows, method.data.max_seq_len) if isinstance(method, LanguageModelFile) else (rows,)

    # ---- the data of a language model ----

    @cached_property
    def text(self) -> NamedText | None:
        """The text that a run must tokenize first; None for a toy, and if the run reads existing rows of tokens."""
        return named_text(self.config) if isinstance(self.config.method, LanguageModelFile) else None

    @property
    def data(self) -> DataFolders | None:
        """Folders of tokens: the wrapper's, or those into which the text is tokenized; None for plain files of rows."""
        return self.config.wrapper.data if self.text is None else self.text.folders

    @cached_property
    def train_rows(self) -> TokenRows:
        """The rows that the run is trained on. Raises UserError for text that is not tokenized yet, and as `TokenData`
        does.
        """
        folders = self._made_data()
        return self._split[0] if folders is None else TokenData(folders.train)

    @property
    def holds_rows_out(self) -> bool:
        """Whether a language model's run keeps rows for its evaluation."""
        return self.config.method.eval is not None or self.config.wrapper.data is not None

    @cached_property
    def held_out_rows(self) -> TokenRows:
        """The rows that are held out for the evaluation. Raises UserError if none are held out, and as `train_rows`
        does.
        """
        folders = self._made_data()
        if not self.holds_rows_out:
            raise UserError(
                "the run had no eval, so it trained on all of its data; give others: --set 'data={train: FOLDER, eval: "
                "FOLDER}'"
            )
        return self._split[1] if folders is None else TokenData(folders.eval)

    def _made_data(self) -> DataFolders | None:
        if self.text is not None and not self.text.is_made:
            raise not_made(self.text)
        return self.data

    @cached_property
    def _split(self) -> tuple[TokenRows, TokenRows]:
        """The rows of plain files: those to train on, and the last ones, which the evaluation reads."""
        method = self.config.method
        assert isinstance(method, LanguageModelFile)
        assert method.data.data_files is not None
        held = 0 if method.eval is None else method.eval.batch_size * method.eval.n_steps
        return split_rows(TokenData(method.data.data_files), held, method.pd.batch_size)
