"""The neighbouring systems, a small room each. Importing this package makes transformers' Auto classes know the models they write."""

import related.dha.modeling
import related.skipless.modeling  # noqa: F401
