"""The addresses of a run's servers reach this process's children, and their keys come out again."""

import subprocess
import sys

from mcore_rl.process.server_keys import (
    SANDBOX_URL,
    SEARCH_URL,
    publish,
    read_sandbox_url,
    read_search_url,
    split_key,
    withdraw,
)

URLS = {
    SANDBOX_URL: "http://run:abc@127.0.0.1:1/run_code",
    SEARCH_URL: "http://run:abc@127.0.0.1:2/retrieve",
}


def test_addresses_are_there_until_they_are_withdrawn() -> None:
    publish(URLS)
    assert (read_sandbox_url(), read_search_url()) == tuple(URLS.values())
    code = "from mcore_rl.process.server_keys import read_search_url; print(read_search_url())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == URLS[SEARCH_URL]
    publish({SEARCH_URL: "http://127.0.0.1:3/retrieve"})
    withdraw(URLS)
    assert (read_sandbox_url(), read_search_url()) == ("", "http://127.0.0.1:3/retrieve")
    withdraw({SEARCH_URL: "http://127.0.0.1:3/retrieve"})
    assert read_search_url() == ""


def test_a_key_is_taken_out_of_an_address() -> None:
    assert split_key(URLS[SANDBOX_URL]) == ("http://127.0.0.1:1/run_code", "abc")
    assert split_key("http://[::1]:8/a?b=c") == ("http://[::1]:8/a?b=c", "")
