"""The Hugging Face hub: the files of a repository from which a model is read, and why it cannot be read."""

import os
from fnmatch import fnmatchcase

from huggingface_hub import hf_hub_download, list_repo_files

from common.models.weights import TOKENIZER_FILES, WEIGHT_FILES, index_shards
from common.run.files import files_in

# next to the weights; an adapter is refused, and the card says the license
OTHER_FILES = ("config.json", "generation_config.json", "adapter_config.json", "README.md")
DENIED = ("GatedRepoError", "RepositoryNotFoundError", "DatasetNotFoundError")


def download_config(repository: str) -> str:
    """The config.json of a repository, in the local cache. Raises what huggingface_hub raises."""
    return hf_hub_download(repository, "config.json")


def download(repository: str) -> str:
    """The directory in the local cache with the files from which transformers reads a repository's model.

    Each one is taken from the cache, whichever program has put it there, or downloaded. If the hub cannot be
    reached, what the cache has of the repository must be enough. Raises what huggingface_hub raises.
    """
    home = os.path.dirname(download_config(repository))
    commit = os.path.basename(home)
    try:
        present = list_repo_files(repository, revision=commit)
    except Exception:  # no network, or access only to what is in the cache
        present = files_in(home)
        if not set(WEIGHT_FILES) & set(present):
            raise
    weights = [name for name in WEIGHT_FILES if name in present][:1]
    for name in [*filter(is_companion, present), *weights]:
        hf_hub_download(repository, name, revision=commit)
    for index in weights:
        for name in index_shards(os.path.join(home, index)):
            hf_hub_download(repository, name, revision=commit)
    return home


def is_companion(name: str) -> bool:
    """Whether a file is part of a model, next to its weights."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
               for pattern in (*OTHER_FILES, *TOKENIZER_FILES))


def reason(error: Exception) -> str:
    """On one line: what a library says of a repository that it cannot read, and what to do if it is gated."""
    reasons = " ".join(" ".join(str(each) for each in (error, error.__cause__) if each).split())
    advice = ("; for a gated or private one, accept its license on its page and log in with `hf auth login`"
              if type(error).__name__ in DENIED else "")
    return f"{reasons or type(error).__name__}{advice}"
