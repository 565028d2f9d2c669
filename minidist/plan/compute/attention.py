"""How long attention takes: softmax(QK')V by a fused kernel at its share of the peak, or as two
products, with all scores written and read between them.

(Dao 2023; Shah et al. 2024.)
"""

from minidist.full.model.config import attended_pairs
from minidist.plan.compute.products import Share
from minidist.plan.model import Product


def attention(share: Share, back: bool) -> float:
    """Return the seconds of softmax(QK')V, or of its backward."""
    device, known, model = share.device, share.known, share.model
    heads = share.batch * max(1, model.heads // share.tp)
    attended = min(share.sequence, model.window or share.sequence)
    if share.kernel == "unfused":
        return unfused_attention(share, back, heads, attended)
    if share.kernel == "flash":
        speed = device.flash
    elif share.kernel == "flash3":
        speed = device.flash3 or device.flash
    else:
        ampere = device.generation == "ampere"
        speed = known["triton_ampere"] if ampere else known["triton_hopper"]
    narrow = known["narrow_heads_blackwell" if device.generation == "blackwell" else "narrow_heads"]
    speed *= min(1.0, (model.key_dim / 128) ** narrow)
    # blocks of 128 queries are dealt out to the processors, in waves: the last one may not be full
    blocks = heads * -(-share.sequence // share.cp // 128)
    units = device.units
    full = 1.0
    if blocks < 8 * units:
        waves = -(-blocks // units)
        full = blocks / (waves * units)
    pairs = heads * pairs_of(share.sequence, attended) / share.cp
    operations = 2 * pairs * (model.key_dim + model.head_dim)
    seconds: float = operations / (device.peak * speed * full)
    if back:
        seconds = 2.5 * seconds / known["backward_attention"]
    return seconds + known["launch"]


def pairs_of(sequence: int, attended: int) -> float:
    """Return the pairs of query and key of a head: the causal half of all, or those in a window."""
    if attended == sequence:
        return 0.5 * sequence * sequence
    return attended_pairs(sequence, attended)


def unfused_attention(share: Share, back: bool, heads: int, attended: int) -> float:
    """Return the same where scores are written and read: two products, and bytes for each score."""
    queries = share.sequence // share.cp
    model = share.model
    scores = share.product(Product(queries, attended, model.key_dim), batch=heads)
    values = share.product(Product(queries, model.head_dim, attended), batch=heads)
    products = scores + values
    if back:
        products *= 2
    bytes_a_score = 11 if back else 9
    all_scores = heads * queries * attended
    return products + share.streamed(bytes_a_score * all_scores)
