"""The special tokens of V4.1 by their real names. Ids differ: here they close a small vocabulary."""

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # ids 0, 1, 2 as in the release
SYSTEM = "<｜System｜>"  # the release also uses its id as DSpark's noise token
IMAGE = "<｜deepseek_image｜>"

# In the order of the release's ids. They stand for themselves in text (not "special" to a decoder), because
# tool and reasoning parsers look for them in decoded text.
NAMED = (
    SYSTEM,
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
IMAGE_SPAN_IDS = 5  # routing treats the image id and the four after it as image tokens


def place_holder(number: int) -> str:
    """The name of an unused id."""
    return f"<｜place▁holder▁no▁{number}｜>"
