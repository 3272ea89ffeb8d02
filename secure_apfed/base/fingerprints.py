"""Fingerprints of public keys and of documents, in words that two people compare by telephone.

A word is one of 256, so a byte: 8 of an identity are 64 bits, for which somebody would have to
draw 2^64 key pairs to pass as its owner; and since a fingerprint is a scrypt (RFC 7914) of 16 MiB,
each draw costs about 50 ms. Of a document, of which somebody in between may make two, words are 12.
No two words begin with the same three letters.
"""

import hashlib

IDENTITY_WORDS = 8
DOCUMENT_WORDS = 12
_SALT = b"secure-apfed words v1"
_WORDS = """
acorn album amber anchor apple arrow atlas autumn avenue bacon badge baker balcony banana barrel
basket beach bell berry bicycle birch biscuit blanket bottle breeze bridge bubble bucket button
cabin cactus camera candle captain carpet castle cedar cellar chapel cherry chimney cinema
circus clover coconut coffee comet copper cotton cradle crystal cushion cycle daisy dancer
december desert diamond dinner dolphin donkey dragon drum eagle easel echo elbow eleven ember
engine evening fabric falcon farmer feather ferry fiddle finger fisher flute fossil fountain
freckle frost funnel galaxy garden gentle ginger giraffe glacier goblet grape guitar hammer
harbour hazel helmet hockey honey hotel hunter icicle igloo index insect iris island ivory
jacket jasmine jelly jigsaw journey jungle kennel kettle keyboard kingdom kitchen koala ladder
lagoon lantern lemon lettuce lily linen lion lizard lobster locket lumber magnet mango maple
marble meadow melon mirror mitten monkey morning mosaic muffin mustard napkin needle nephew
nickel noodle north november number nutmeg oasis ocean october olive onion opera orange orchard
otter oven oyster paddle palace parrot pastry pebble pelican pencil pepper piano picnic pigeon
pillow planet pocket pony potato puddle pumpkin pyramid quarry quilt rabbit radio raven ribbon
ridge river robin rocket rooster ruby runner saddle salmon sandal satin school scooter season
seven shadow silver sister skipper sleigh snail soccer spider squirrel stable sugar summer
sweater swing syrup table tailor tango teapot temple thimble thunder ticket tiger timber tomato
tractor trumpet tulip turtle twenty umbrella uncle unicorn valley vanilla velvet vessel village
violin volcano vulture waffle wagon walnut water weasel welcome whale window
""".split()  # noqa: SIM905 - a list literal would be a page long


def format_as_words(content: bytes, count: int) -> str:
    """Return a fingerprint of `content` as `count` words, which two people can compare aloud.

    The digest is scrypt, which is slow on purpose: a search for other content with equal words
    must compute it for each candidate.

    `content`: a public key (`IDENTITY_WORDS` words) or a document's digest (`DOCUMENT_WORDS`).
    """
    digest = hashlib.scrypt(content, salt=_SALT, n=2**14, r=8, p=1, dklen=count)
    return " ".join(_WORDS[byte] for byte in digest)
