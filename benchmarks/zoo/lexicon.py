"""Word tables of the zoo's language: names of what can be drawn, and the many words that decorate long descriptions."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")
PLURALS = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "diamond": "diamonds",
    "cross": "crosses",
    "ring": "rings",
    "star": "stars",
}
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "on the left",
    "in the centre",
    "on the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
LIVELY_PLACES = (
    ("in the top left corner", "up in the left corner", "high on the left"),
    ("along the top edge", "right at the top", "high in the middle"),
    ("in the top right corner", "up in the right corner", "high on the right"),
    ("on the left side", "by the left edge", "halfway down the left"),
    ("in the very centre", "in the heart of the picture", "right in the middle"),
    ("on the right side", "by the right edge", "halfway down the right"),
    ("in the bottom left corner", "down in the left corner", "low on the left"),
    ("along the bottom edge", "right at the bottom", "low in the middle"),
    ("in the bottom right corner", "down in the right corner", "low on the right"),
)
TEXTURE_WORDS = {
    "plain": ("plain", "solid", "smooth", "unpatterned"),
    "striped": ("striped", "banded", "stripy"),
    "dotted": ("dotted", "spotted", "speckled"),
}
SIZE_WORDS = {"small": ("small", "little", "tiny", "compact"), "large": ("large", "big", "broad", "hefty")}
SHADES = _words("bright deep vivid warm cool pure rich strong clear frank lively honest")
COLOUR_LIKE = {
    "red": "paprika cherries rubies poppies ketchup brick lava tomatoes",
    "green": "moss clover limes cucumbers ivy pines frogs basil",
    "blue": "sapphires cobalt denim cornflowers ink twilight oceans gentians",
    "yellow": "butter lemons mustard canaries custard daffodils corn straw",
    "purple": "plums violets grapes lavender beetroot heather amethysts aubergines",
    "orange": "carrots pumpkins apricots marigolds amber tangerines saffron embers",
    "cyan": "lagoons glaciers turquoise icicles peppermint aquariums shallows skies",
    "pink": "flamingos candyfloss roses salmon blossoms bubblegum peonies marshmallows",
}
SHAPE_LIKE = {
    "circle": "coin plate moon button pancake wheel pea drum",
    "square": "tile window biscuit crate stamp chessboard cushion brick",
    "triangle": "tent roof pyramid sail wedge pennant mountain funnel",
    "diamond": "kite gem lozenge crystal leaf earring shield rhombus",
    "cross": "plus windmill crossroads bandage propeller signpost pinwheel scaffold",
    "ring": "doughnut hoop tyre bracelet lifebuoy bagel halo washer",
    "star": "starfish badge spark snowflake firework beacon compass asterisk",
}
MOODS = _words("""
calm cheerful solemn quiet restless playful sleepy dreamy gentle stern tidy chaotic festive lonely crowded airy
heavy light crisp dusty fresh ancient modern humble proud shy bold curious patient nervous serene merry gloomy sunny
wintry autumnal tropical rustic urban royal modest formal casual clumsy elegant graceful awkward balanced lopsided
hopeful wistful nostalgic melancholy jolly grumpy mellow sober tipsy dizzy brisk lazy languid eager stubborn tender
rugged polished rough silky velvety brittle sturdy fragile hollow dense sparse generous frugal lavish stark austere
ornate baroque minimal abstract concrete familiar foreign exotic homely cosy chilly breezy stormy misty foggy cloudy
starry luminous dim shadowy radiant faded weathered pristine spotless grimy sticky slippery juicy zesty bitter sweet
salty spicy bland savoury musical rhythmic silent loud whispering echoing hushed thunderous magical haunted
enchanted ordinary peculiar quirky whimsical absurd logical mathematical geometric scientific poetic theatrical
cinematic heroic tragic comic epic tiresome thrilling soothing hypnotic electric magnetic volcanic glacial coastal
alpine marine lunar cosmic earthly heavenly innocent mischievous cunning wise foolish noble wild tame loyal fickle
sincere ironic cryptic candid secretive mysterious obvious subtle blunt delicate robust nimble sluggish agile frozen
molten liquid crystalline wooden metallic papery woollen leathery feathery mossy sandy rocky grassy leafy thorny
blooming withered ripe
""")
OBJECTS = _words("""
lantern teapot violin umbrella ladder suitcase pocketwatch compass candle mirror blanket basket kettle hammer anchor
feather pebble thimble ribbon puzzle marble trumpet accordion flute cello drumstick harmonica typewriter telescope
microscope postcard envelope newspaper diary atlas dictionary novel poem ballad symphony lullaby carousel trampoline
bicycle tricycle scooter wagon sleigh canoe raft ferry steamship submarine airship balloon glider rocket satellite
tram locomotive tractor caravan hammock armchair wardrobe bookshelf chandelier carpet curtain pillow quilt sweater
scarf mitten bonnet slipper sandal jacket apron necktie handkerchief brooch necklace crown sceptre helmet sword
banner puppet doll teddy spinning-top domino backgammon chessman jigsaw crayon paintbrush easel canvas sketchbook
stencil mosaic fresco tapestry statue fountain obelisk archway staircase balcony chimney weathervane gate fence
hedge orchard vineyard meadow thermometer barometer hourglass metronome pendulum gyroscope prism magnet battery
lightbulb switchboard radio gramophone cassette camera projector keyboard spreadsheet barcode ticket passport coupon
receipt stethoscope syringe wrench pliers screwdriver chisel anvil bellows spindle loom bobbin shuttle whistle
tambourine gong bell rattle toolbox lunchbox jar bottle barrel bucket spoon ladle whisk saucepan colander toaster
waffle dumpling noodle pretzel croissant baguette muffin cheesecake trifle pudding sorbet caramel nougat truffle
pickle olive radish turnip parsnip artichoke mushroom walnut chestnut almond hazelnut raisin
""")
ANIMALS = _words("""
otter badger hedgehog squirrel heron owl sparrow magpie pelican puffin penguin walrus seal dolphin whale lobster
crab snail beetle ladybird dragonfly cricket moth butterfly tortoise lizard gecko chameleon toad newt salamander fox
hare rabbit mole shrew weasel lynx leopard cheetah panther tiger elephant rhinoceros giraffe zebra antelope camel
llama donkey pony goat lamb piglet goose duckling cockerel peacock parrot toucan hummingbird octopus jellyfish
""")
PEOPLE = _words("""
baker sailor gardener tailor librarian painter sculptor carpenter plumber astronomer chemist botanist surgeon nurse
teacher pupil juggler acrobat magician dancer drummer pianist conductor composer poet novelist editor printer
postman fisherman shepherd farmer miller blacksmith cobbler barber jeweller watchmaker clockmaker innkeeper cook
waiter pilot driver cyclist skater climber swimmer diver explorer pirate knight queen emperor duchess jester wizard
witch ghost dentist lawyer judge senator diplomat detective clerk accountant banker merchant pedlar beekeeper
lighthouse-keeper grandmother grandfather uncle aunt cousin neighbour stranger traveller pilgrim monk toddler twin
engineer architect surveyor welder glazier weaver potter
""")
DEEDS = _words("""
painted carved stitched baked polished borrowed forgot hid folded wrapped assembled invented photographed sketched
traced measured weighed counted juggled balanced dropped stacked scattered gathered sorted traded mended lost found
buried planted watered admired ignored praised mocked copied framed hung mailed delivered smuggled whispered sang
hummed dreamed imagined remembered described cut glued knitted embroidered welded forged moulded
""")
OPINIONS = _words("""
adore dismiss treasure inspect collect question defend recommend study applaud misread puzzle-over misplace auction
frame memorise caption exhibit archive gift
""")
ADVERBS = _words("""
slowly quickly carefully carelessly happily sadly quietly loudly proudly secretly openly patiently hastily neatly
boldly shyly kindly sternly lazily eagerly gently firmly warmly coldly wisely foolishly gladly reluctantly calmly
nervously cleverly blindly faithfully solemnly merrily silently politely rudely gracefully clumsily
""")
SETTINGS = _words("""
harbour lighthouse attic cellar kitchen library museum theatre circus market bakery workshop garage airport station
village castle monastery chapel cathedral bridge tunnel canal river lake waterfall island beach desert forest jungle
swamp prairie valley canyon cliff cave volcano glacier tundra playground schoolyard classroom laboratory observatory
hospital courtroom stadium ballroom greenhouse barn stable windmill courtyard rooftop alley boulevard plaza suburb
metropolis
""")
TIMES = _words("""
morning noon afternoon evening midnight dawn dusk spring summer autumn winter Monday Tuesday Wednesday Thursday
Friday Saturday Sunday January February March April May June July August September October November December
Christmas Easter yesterday tomorrow childhood
""")
SCENTS = _words("""
cinnamon vanilla ginger nutmeg cardamom thyme rosemary sage mint coffee cocoa honey vinegar smoke rain hay leather
tobacco chalk soap pepper garlic varnish turpentine seaweed bread popcorn lilac jasmine camphor
""")
NOUNS = _words("""
silence order rhythm harmony tension humour patience courage memory secret promise riddle rumour legend fable
prophecy argument apology farewell reunion holiday journey detour shortcut errand parade picnic banquet concert
rehearsal wedding carnival tournament experiment theorem equation paradox proverb anecdote chapter verse melody echo
shadow glow shimmer glimmer breeze drizzle thunder rainbow eclipse sunrise sunset tide current avalanche
""")
