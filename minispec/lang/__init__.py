"""A prompting language: programs that interleave text with what the model writes, fork, and choose.

The names and their meaning follow SGLang's frontend (Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", section 2). Taught in notebook 13 (everything on).
"""

from minispec.lang.choices import greedy_token_selection, token_length_normalized, total_likelihood
from minispec.lang.backends import BackendError, Runtime, RuntimeEndpoint
from minispec.lang.expressions import assistant, assistant_begin, assistant_end, gen, select, system, system_begin
from minispec.lang.expressions import system_end, user, user_begin, user_end
from minispec.lang.program import Backend, Cancelled, ProgramState, function, set_default_backend
