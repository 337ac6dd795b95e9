"""The Hugging Face hub: the files of a repository from which a model is read, and why it cannot be read."""

import os

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from common.models.weights import TOKENIZER_FILES, WEIGHT_FILES, index_shards

# next to the weights; an adapter is refused, and the card says the license
OTHER_FILES = ("config.json", "generation_config.json", "adapter_config.json", "README.md")
DENIED = ("GatedRepoError", "RepositoryNotFoundError", "DatasetNotFoundError")


def download_config(repository: str) -> str:
    """The config.json of a repository, in the local cache. Raises what huggingface_hub raises."""
    return hf_hub_download(repository, "config.json")


def download(repository: str) -> str:
    """The directory in the local cache with the files from which transformers reads a repository's model.

    Each one is taken from the cache, whichever program has put it there, or downloaded. Raises what
    huggingface_hub raises.
    """
    home = os.path.dirname(download_config(repository))
    commit = os.path.basename(home)
    snapshot_download(repository, revision=commit, allow_patterns=[*OTHER_FILES, *TOKENIZER_FILES],
                      ignore_patterns="original/*")  # of a Llama in Meta's own format
    for name in WEIGHT_FILES:
        try:
            shards = index_shards(hf_hub_download(repository, name, revision=commit))
        except EntryNotFoundError as error:  # also of what the cache lacks, if there is no network
            missing = error
            continue
        if shards:
            snapshot_download(repository, revision=commit, allow_patterns=shards)
        return home
    raise missing


def reason(error: Exception) -> str:
    """On one line: what a library says of a repository that it cannot read, and what to do if it is gated."""
    reasons = " ".join(" ".join(str(each) for each in (error, error.__cause__) if each).split())
    advice = ("; for a gated or private one, accept its license on its page and log in with `hf auth login`"
              if type(error).__name__ in DENIED else "")
    return f"{reasons or type(error).__name__}{advice}"
