"""The grammar of the `demo` corpus: its words and its plots, as tables in two columns. `plots.py` reads them.

In a plot the left column names a beat, which a story may leave out if the name ends in `?`. Each line on the right is
one telling of the beat. `{role}` is a slot for words, `{+role}` a slot where the role may appear for the first time,
`(a|b)` a choice of words. `{He}`, `{him}` and `{his}` are pronouns of the hero, `{friend_he}` ones of the friend.

Three entries of a plot are not beats. `key` names the roles that are its want, its obstacle and its place. `rows` lists
words that fit together: its first line names the roles, commas separate words that fit equally well. `questions` lists
pairs `question | answer`.
"""

# The words of each role. `{spot2}` is a second role with the words of `spot`; the two never hold the same word.
LEXICON = """
    she           Mia, Lily, Anna, Ruby, Nora, Ella, Rosa, Zoe, Ivy, Clara, Hana, Lucy, Maya, Tess, Wren, Mei, Nina
                  Poppy, Olga, Sofia
    he            Tom, Ben, Max, Leo, Sam, Finn, Otto, Hugo, Jack, Noah, Omar, Theo, Kai, Felix, Oscar, Ravi, Pip
                  Bruno, Milo, Arlo
    kind          mouse, fox, rabbit, bear, frog, duck, cat, dog, pig, squirrel, hedgehog, penguin, snail, sheep
                  dragon, robot, giant, ghost, wizard, child
    trait         little, small, brave, cheerful, curious, lazy, proud, merry, polite, clumsy, round, tidy
    adj           wise, tall, friendly, quiet, clever, tiny, sleepy, grumpy, jolly, shy, gentle, skinny
    helper        owl, crow, goose, mole, beaver, turtle, horse, cow, badger, otter, donkey, goat, swan, lizard, camel
                  baker, farmer, sailor
    colour        red, blue, green, yellow, white, black, brown, pink, purple, golden, silver, grey
    object        ball, hat, bell, whistle, blanket, balloon, mirror, pillow, basket, spoon, ribbon, button, shell
                  lantern, mug, puppet
    wear          scarf, cap, coat, cape, apron, jacket
    kin           grandmother, grandfather, mother, father, aunt, uncle
    vegetable     carrot, turnip, radish, cabbage, pumpkin, potato, leek
    food          cheese sandwich, honey bun, plum cake, nut pie, jam roll, big pear
    shop          to the market, to the toy shop, to the fair, to the harbour, into town, to every shop in town
    home          under an old oak tree, in a teapot, behind the bakery, at the edge of the wood
                  in a boot by the road, in a tall crooked house, next to the mill, on a small island, in a barrel
                  above the post office, in a cave by the sea, at the end of the lane
    place         on top of the hill, in the old castle, behind the waterfall, in the deep forest
                  across the valley, in the ruined tower, on the windy beach, behind the rose garden
                  in the secret meadow, beside the silent lake
    spot          under the bed, behind the door, in the bread bin, on the roof, in the bathtub, under the stairs
                  in the soup pot, up in the apple tree, behind the clock, in the letter box, under the carpet
    find          a sleeping beetle, three old nuts, one wet sock, half a biscuit, a surprised spider, a cold potato
                  a letter from last year, some dust, two angry ants, an empty jar
"""

# Words that may open any sentence, and words that may occur anywhere: the checker ignores them.
OPENERS = """
    then, so, but, and, next, first, now, soon, at last, one day, one morning, just then, in the end, the next day
    the next morning, that evening, an hour later, one week later, from that day on, after that
"""
FILLERS = "very, really, quite"

# What all plots share: openings, further endings, and questions.
OPENING = """
    opening       Once upon a time there was a {+trait} {+kind} named {+hero}. {He} lived {+home}.
                  Once upon a time there was a {+trait} {+kind} named {+hero} who lived {+home}.
                  Once upon a time a {+trait} {+kind} named {+hero} lived {+home}.
                  There once was a {+trait} {+kind} named {+hero}. {hero} lived {+home}.
                  {+hero} was a {+trait} {+kind} who lived {+home}.
                  This is the story of {+hero}, a {+trait} {+kind} who lived {+home}.
    habit?        {He} always wore a {+wear_colour} {+wear}(|, even in bed).
                  Everyone knew {him} by {his} {+wear_colour} {+wear}.
                  {He} never went out without {his} {+wear_colour} {+wear}.
"""

ENDING = """
    ending        That night {hero} hung up {his} {wear_colour} {wear} and slept until noon.
                  {hero} threw {his} {wear_colour} {wear} in the air and danced all the way home.
                  That night {he} slept like a log {home}.
                  {hero} smiled about it for a whole week.
"""

QUESTIONS = """
    questions     What was the {kind} named? | The {kind} was named {hero}.
                  What kind of animal or person was {hero}? | {hero} was a {trait} {kind}.
                  Where did {hero} live? | {hero} lived {home}.
                  What did {hero} wear? | {hero} wore a {wear_colour} {wear}.
"""

PLOTS = {
    "quest": """
    key           object obstacle place
    rows          obstacle | tool | solved
                  wide river | boat, raft | got across the river
                  high wall | ladder, strong rope | climbed over the wall
                  locked gate | rusty key, bunch of keys | opened the gate
                  dark cave | lamp, candle | found the way through the cave
                  thorny hedge | pair of shears | cut a way through the hedge
                  deep snowdrift | sledge, pair of skis | slid over the snow
                  broken bridge | hammer, long plank | mended the bridge
                  fallen tree | saw, sharp axe | cut through the tree
                  hungry troll | warm pie, pot of soup | fed the troll until it fell asleep
                  huge puddle | pair of stilts, pair of boots | walked through the puddle
    want          More than anything, {hero} wanted a {+colour} {+object}.
                  {He} wanted a {+colour} {+object} more than (anything|cake|all the tea in the world).
                  Every night {he} dreamed of a {+colour} {+object}.
    news          One day {he} heard that there was one {+place}.
                  (A little bird|The postman) told {him} that there was one {+place}.
                  An old book said that there was one {+place}.
    leaving?      So {he} packed (two sandwiches|a plum|three socks) and set out.
                  {hero} set out (at once|before breakfast).
                  The next morning {he} set out with a song.
    obstacle      On the way {he} came to a {+obstacle} and could not go on.
                  But there was a {+obstacle} in {his} way.
                  After a mile {he} met a {+obstacle} and had to stop.
    worry?        {He} sat down on a stone and sighed.
                  "Oh dear, oh dear," said {hero}.
                  {hero} scratched {his} head and had no idea what to do.
    helper        Then a {+adj} {+helper} came by with a {+tool}.
                  Just then a {+adj} {+helper} came along and had a {+tool}.
                  "What you need is a {+tool}," said a {+adj} {+helper}, "and I have one."
    help          With the {tool} they {+solved}.
                  They used the {tool} and {+solved}.
                  "Use my {tool}," said the {adj} {helper}, and so {hero} {+solved}.
    fulfilment    And there, {place}, was the {colour} {object}.
                  {hero} found the {colour} {object} {place}, just waiting for {him}.
                  At last {he} stood {place} and held the {colour} {object} in {his} arms.
    thanks        "Thank you for the {tool}," said {hero} to the {adj} {helper}.
                  {hero} thanked the {adj} {helper} (three times|with a hug).
                  {hero} bowed to the {adj} {helper} and said thank you.
    ending        {hero} took the {colour} {object} home and showed it to everyone, even the moon.
                  From that day on the {colour} {object} had the best chair in the house.
                  {hero} and the {adj} {helper} had tea, and the {colour} {object} had a cup too.
    questions     Who helped {hero}? | The {adj} {helper} helped {hero}.
                  What did {hero} want? | {hero} wanted a {colour} {object}.
                  Where was the {colour} {object}? | The {colour} {object} was {place}.
                  What was in the way? | There was a {obstacle} in the way.
                  What did the {adj} {helper} bring? | The {adj} {helper} brought a {tool}.
    """,
    "lost": """
    key           object spot3 home
    treasure      {He} had a {+colour} {+object} and took it everywhere.
                  The thing {he} loved best was a {+colour} {+object}.
                  {His} greatest treasure was a {+colour} {+object}.
    loss          One morning the {colour} {object} was gone.
                  But one day {he} woke up and the {colour} {object} was not there.
    first look    {hero} looked {+spot} but found only {+find}.
                  First {he} looked {+spot}, where there was only {+find}.
    second look?  Then {he} looked {+spot2}, but there was only {+find2}.
                  Next {he} searched {+spot2} and found {+find2}.
    worry?        {hero} cried a little, and then a little more.
                  "I will never be happy again," said {hero}.
    helper        "Why are you sad?" asked a {+adj} {+helper}.
                  A {+adj} {+helper} heard {him} and came to see what was wrong.
    telling?      "I have lost my {colour} {object}," said {hero}.
    clue          "Something {colour} is {+spot3}," said the {adj} {helper}.
                  "Have you looked {+spot3}?" asked the {adj} {helper}.
                  "I saw your {object} {+spot3}," said the {adj} {helper}.
    finding       {hero} ran to look {spot3}, and there was the {colour} {object}!
                  And there it was, the {colour} {object}, {spot3}.
    thanks        {hero} hugged the {adj} {helper} and said thank you.
                  "Thank you for finding my {colour} {object}," said {hero} to the {adj} {helper}.
                  "You have the best eyes in the world," {hero} told the {adj} {helper}.
    ending        From that day on {hero} tied the {colour} {object} to {his} bed at night.
                  {hero} never lost the {colour} {object} again, but the next day {he} lost {his} left shoe.
                  {hero} and the {adj} {helper} played with the {colour} {object} until it was dark.
    questions     Who helped {hero}? | The {adj} {helper} helped {hero}.
                  What did {hero} lose? | {hero} lost a {colour} {object}.
                  Where did {hero} look first? | First {hero} looked {spot}.
                  What did {hero} find {spot2}? | {hero} found {find2} {spot2}.
                  Where was the {colour} {object}? | The {colour} {object} was {spot3}.
    """,
    "kindness": """
    key           food mishap place
    rows          mishap | tool | safe
                  fell into a deep hole | long rope, ladder | out of the hole
                  got lost in the fog | bright lamp, loud bell | out of the fog
                  got stuck in the mud | long rope, wide plank | out of the mud
                  fell into the cold pond | long oar, fishing net | out of the water
                  was caught in the rain | big umbrella, giant leaf | dry again
                  got stuck up a tree | ladder, heap of hay | down from the tree
    picnic        One day {hero} took a {+food} and went to eat it {+place}.
                  {hero} wanted to eat a {+food} {+place}.
    meeting       There {he} met a {+adj} {+helper} who had not eaten all day.
                  On a log sat a {+adj} {+helper} with a rumbling belly.
    sharing       {hero} gave half of the {food} to the {adj} {helper}.
                  "You can have half of my {food}," {hero} told the {adj} {helper}.
                  {hero} gave the bigger half of the {food} to the {adj} {helper}.
    promise?      "I will not forget this," said the {adj} {helper}.
                  "One day I will help you too," said the {adj} {helper}.
    mishap        On the way home {hero} {+mishap}.
                  An hour later {hero} {+mishap}.
    cry?          "Help, help!" cried {hero}.
                  {He} called for help as loudly as {he} could.
    rescue        Who came running with a {+tool}? It was the {adj} {helper}.
                  The {adj} {helper} heard {him} and came with a {+tool}.
    help          With the {tool} {hero} was soon {+safe}.
                  The {tool} was just right, and {he} was {+safe}.
    thanks        "Thank you, thank you," said {hero} to the {adj} {helper}.
                  {hero} thanked the {adj} {helper} from head to toe.
                  "That was worth more than half a {food}," {hero} told the {adj} {helper}.
    ending        The next day {hero} and the {adj} {helper} shared another {food} {place}.
                  From that day on {hero} always packed one {food} for the {adj} {helper}.
                  {hero} and the {adj} {helper} were friends for ever.
    questions     Who helped {hero}? | The {adj} {helper} helped {hero}.
                  What did {hero} share? | {hero} shared a {food}.
                  What happened to {hero}? | {hero} {mishap}.
                  What did the {adj} {helper} bring? | The {adj} {helper} brought a {tool}.
                  Where did {hero} meet the {adj} {helper}? | {hero} met the {adj} {helper} {place}.
    """,
    "fear": """
    key           deed fear home
    rows          fear | gift | deed
                  the dark | little lamp, jar of fireflies | walked to the end of the dark garden
                  thunder | big drum, tin trumpet | made more noise than the storm
                  deep water | cork belt, rubber ring | swam across the lake
                  high places | strong rope, pair of climbing boots | climbed to the top of the tower
                  big dogs | bag of biscuits, juicy bone | fed the biggest dog in the village
                  the forest | map, ball of string | walked through the forest and back
    fear          But {hero} was afraid of {+fear}.
                  There was one thing {he} did not like at all, and that was {+fear}.
                  {hero} was never afraid, except of {+fear}.
    hiding?       {He} hid under the table and put a bucket on {his} head.
                  {His} knees shook whenever {he} thought of it.
    friend        {His} friend was {+friend} the {+friend_kind}.
                  One day {he} told {+friend} the {+friend_kind} about it.
                  Only {+friend} the {+friend_kind} did not laugh at {him}.
    comfort?      "I was once afraid of {fear} too," said {friend}.
                  "Everyone is afraid of something, and you are afraid of {fear}," said {friend}.
    gift          {friend} opened {friend_his} bag and took out a {+gift}.
                  Then {friend} gave {him} a {+gift}.
                  "When I am afraid I take my {+gift}," said {friend}, and {friend_he} gave it to {hero}.
    courage?      {hero} held the {gift} tight and took (a deep breath|three deep breaths).
                  {hero} took the {gift} and counted to ten.
    deed          Then {he} {+deed}, and {friend} came too.
                  With the {gift} in {his} hands {he} {+deed}.
    pride?        {friend} clapped until {friend_his} hands were sore.
                  {He} was so proud that {he} grew an inch.
    thanks        "Thank you for the {gift}," said {hero} to {friend}.
                  {hero} thanked {friend} with (a kiss|a hug).
    ending        From that day on {hero} was never afraid of {fear} again.
                  Now {hero} gives the {gift} to anyone who is afraid of {fear}.
                  {hero} and {friend} still laugh about {fear}, and the {gift} hangs by the door.
    questions     What was {hero} afraid of? | {hero} was afraid of {fear}.
                  Who helped {hero}? | {friend} the {friend_kind} helped {hero}.
                  What did {friend} give {hero}? | {friend} gave {hero} a {gift}.
                  What did {hero} do in the end? | {hero} {deed}.
    """,
    "learn": """
    key           skill helper home
    rows          skill | fail | tip | success
                  swim | sank like a stone | kick with both legs | swam all the way around the pond
                  whistle | only made a wet noise | blow softly | whistled a song for the birds
                  skate | sat down hard on the ice | bend your knees | skated in a circle and did not fall
                  juggle | dropped every egg | start with two eggs | kept three eggs in the air
                  ride a bicycle | rode into a hedge | look far ahead | rode down the hill without a wobble
                  dance | stepped on all the toes in the room | count to four | danced until the band went home
                  row a boat | went round and round | pull both oars at once | rowed to the island and back
                  play the violin | sounded like an angry cat | hold the bow lightly | played until the moon came out
    want          {He} wanted to learn to {+skill}.
                  {hero} had one great wish, and that was to {+skill}.
                  All day long {he} thought, "I want to {+skill}."
    first try     On Monday {he} tried and {+fail}.
                  The first time {he} tried, {he} {+fail}.
    second try?   On Tuesday {he} tried again and {fail} again.
                  The second time {he} shut {his} eyes and {fail} again.
                  On Tuesday it was no better.
    worry?        "I will never learn to {skill}," said {hero}.
                  {He} lay down in the grass and looked at the clouds.
    helper        A {+adj} {+helper} had watched it all.
                  Then a {+adj} {+helper} stopped to look.
                  "Let me show you," said a {+adj} {+helper}.
    tip           "You must {+tip}," said the {adj} {helper}.
                  "To {skill}, {+tip}," said the {adj} {helper}.
    practice?     {hero} did as the {adj} {helper} said.
                  So {hero} tried it the new way, again and again.
                  {He} practised every day from breakfast to tea.
    success       On Sunday {hero} {+success}.
                  And at last {he} {+success}!
                  One week later {hero} {+success}.
    thanks        {hero} ran to the {adj} {helper} and said thank you.
                  "Thank you for your help," said {hero} to the {adj} {helper}.
                  "I had the best teacher," said {hero}, and the {adj} {helper} blushed.
    ending        Now {hero} helps everyone who wants to {skill}.
                  {hero} and the {adj} {helper} meet every Sunday to {skill}.
                  Now {he} wants to learn to {skill} backwards.
    questions     Who helped {hero}? | The {adj} {helper} helped {hero}.
                  What did {hero} want to learn? | {hero} wanted to learn to {skill}.
                  What happened the first time? | The first time {hero} {fail}.
                  What did the {adj} {helper} say? | The {adj} {helper} said, "You must {tip}."
    """,
    "quarrel": """
    key           thing advice place
    rows          thing | advice | fair
                  ball, kite, drum, swing, wagon, rope | take turns | took turns until the sun went down
                  pie, melon, cake, loaf, cheese | cut it in two | cut it in two and ate half each
                  heavy sack, big log, long bench | carry it together | carried it home together
    friend        {His} best friend was {+friend} the {+friend_kind}.
                  Every day {he} went for a walk with {+friend} the {+friend_kind}.
    finding       One day they found a {+thing} {+place}.
                  One day there was a {+thing} {+place}, and it belonged to nobody.
    quarrel       "The {thing} is mine," said {hero}.
                  {hero} wanted the {thing}, and {friend} wanted the {thing} too.
    reply         "No, I saw it first," said {friend}.
                  {friend} stamped {friend_his} foot and would not let go.
                  "Then I am not your friend any more," said {friend}, and {friend_he} turned {friend_his} back.
    silence?      They pulled and shouted until the birds covered their ears.
                  For an hour they did not say a word.
    helper        A {+adj} {+helper} came to see what the noise was about.
                  The noise woke a {+adj} {+helper}.
    advice        "Why do you not {+advice}?" asked the {adj} {helper}.
                  "Friends can {+advice}," said the {adj} {helper}.
    peace?        {hero} looked at {friend}, {friend} looked at {hero}, and they laughed.
                  "I am sorry," said {hero}, and {friend} was sorry too.
    fair deal     So {hero} and {friend} {+fair}.
                  And that is what they did: they {+fair}.
    thanks?       They both said thank you to the {adj} {helper}.
    ending        After that {hero} and {friend} never fought about a {thing} again.
                  A {thing} is good, but a friend is better, and {hero} had both.
                  {hero} and {friend} had a {thing}, a friend and a sore throat.
    questions     Who was the friend of {hero}? | The friend of {hero} was {friend} the {friend_kind}.
                  What did they find? | They found a {thing}.
                  Where did they find it? | They found it {place}.
                  What did the {adj} {helper} tell them to do? | The {adj} {helper} told them to {advice}.
    """,
    "rule": """
    key           rule mishap home
    rows          rule | broke | mishap | mend
                  open the tin box | opened the tin box | a hundred moths flew out | caught the moths one by one
                  ring the big bell | rang the big bell | the whole village woke up | said sorry at every door
                  shake the apple tree | shook the apple tree | all the apples fell | picked up every apple
                  blow the old horn | blew the old horn | forty sheep came running | led the sheep back one by one
                  pull the long string | pulled the long string | the washing fell in the mud | washed it all again
                  turn the brass tap | turned the brass tap | the kitchen filled with water | mopped the kitchen dry
                  touch the wet paint | touched the wet paint | there were spots on every wall | painted the walls again
                  stir the strange soup | stirred the strange soup | it jumped out of the pot | cooked a new pot of soup
    rule          "Whatever you do, do not {+rule}," said {his} {+kin} one morning.
                  One day {his} {+kin} said, "Please do not {+rule}."
                  {hero}'s {+kin} had only one rule, and that was, "Do not {+rule}."
    leaving?      Then {his} {kin} went out to buy bread.
                  {His} {kin} put on a hat and went to town.
    waiting?      {hero} waited for one minute, then two, then three.
                  {He} tried to think of something else, but it was no use.
                  {He} sat on {his} hands and hummed a tune.
    mistake       But in the end {he} {+broke}.
                  {hero} looked left, looked right, and {+broke}.
    mishap        At once {+mishap}!
                  There was a bang, and {+mishap}.
                  It was quiet for a moment, and then {+mishap}.
    regret?       "Oh no, what have I done?" said {hero}.
                  {hero} went as red as a beetroot.
    repair        {hero} was very sorry and {+mend}.
                  It took all day, but {he} {+mend}.
    truth         "I did it, and I am sorry," {he} told {his} {kin} that evening.
                  When {his} {kin} came home, {hero} told the truth.
    forgiveness?  {His} {kin} gave {him} a hug for being honest.
                  "Thank you for telling me," said {his} {kin}, and they had cocoa.
                  {His} {kin} laughed and said, "I did that too when I was young."
    ending        And {hero} never {broke} again.
                  {hero} never {broke} again, at least not on a Monday.
                  From that day on {he} listened to {his} {kin}, most of the time.
    questions     Who made the rule? | The {kin} of {hero} made the rule.
                  What was the rule? | The rule was, "Do not {rule}."
                  What did {hero} do? | {hero} {broke}.
                  How did {hero} put it right? | {hero} {mend}.
    """,
    "gift": """
    key           object colour shop
    friend        {His} best friend was {+friend} the {+friend_kind}, who loved everything {+colour}.
                  {hero} had a friend, {+friend} the {+friend_kind}, whose house was {+colour} inside and out.
                  {hero} liked {+friend} the {+friend_kind}, who ate only from {+colour} plates.
    birthday      It was nearly {friend}'s birthday, so {hero} went {+shop}.
                  "I need a {colour} present for {friend}," said {hero}, and {he} went {+shop}.
    first find    {He} saw a {+colour2} {+object2}, but it was not {colour}.
                  There was a {+colour2} {+object2}, but {colour2} would not do.
    second find?  Then {he} saw a {+colour3} {+object3}, but {colour3} was wrong too.
                  Next came a {+colour3} {+object3}, and {he} shook {his} head.
    choice        In the very last corner {he} found a {colour} {+object}.
                  At last, behind a pile of hats, lay a {colour} {+object}.
    wrapping?     {He} wrapped it in (newspaper|a cabbage leaf|an old sock) and tied it with string.
                  It cost {him} all {his} pennies.
    present       {friend} opened {friend_his} present, and {friend_his} eyes grew wide.
                  {friend} was so glad that {friend_he} (jumped over a chair|danced on the table|turned pink).
    thanks        "A {colour} {object}, thank you!" cried {friend}.
                  "Thank you, {hero}, I always wanted a {colour} {object}," said {friend}.
    ending        {friend} took the {colour} {object} to bed, and {hero} had three pieces of cake.
                  From that day on {friend} never went anywhere without the {colour} {object}.
                  {hero} and {friend} put the {colour} {object} on the table and danced around it.
    questions     What colour did {friend} like? | {friend} liked {colour}.
                  Where did {hero} go? | {hero} went {shop}.
                  What did {hero} give {friend}? | {hero} gave {friend} a {colour} {object}.
                  Who got a present? | {friend} the {friend_kind} got a present.
    """,
    "harvest": """
    key           vegetable helper home
    want          One spring {hero} wanted {+vegetable} soup, so {he} planted a {vegetable}.
                  {He} loved {+vegetable} soup, so {he} planted a {vegetable}.
    growing?      It rained, the sun shone, and the {vegetable} grew as big as a (barrel|cow|bathtub).
                  All summer the {vegetable} grew until it hid the sun.
    first try     {hero} pulled and pulled, but the {vegetable} did not move.
                  In autumn {he} pulled at the {vegetable} until {his} face was purple.
    first helper  A {+adj} {+helper} came to help, but it was not enough.
                  {He} called a {+adj} {+helper}, but still it stuck.
    more help     A {+adj2} {+helper2} came too, but they all fell on their backs.
                  Then a {+adj2} {+helper2} took hold as well, and it moved by one inch.
    last helper   Last of all came {+friend} the {+friend_kind}, who was late for lunch.
                  "Wait for me," called {+friend} the {+friend_kind}.
    pulling       The {adj} {helper} pulled, the {adj2} {helper2} pulled, and {friend} pulled with {friend_his} teeth.
                  "One, two, three," called {hero}, and they all pulled at once.
    success       Pop went the {vegetable}, and they all flew into the hedge!
                  Out came the {vegetable} with a sound like a cork.
    soup?         {hero} cooked {vegetable} soup in the biggest pot {he} could find.
                  That evening there was {vegetable} soup for all of them.
    thanks        "Thank you," said {hero} to the {adj} {helper}, the {adj2} {helper2} and {friend}.
                  {hero} thanked {friend}, and the {adj} {helper}, and the {adj2} {helper2}.
                  {hero} thanked them all, and {friend} twice.
    ending        {friend} ate nine bowls, and nobody knows where {friend_he} put them.
                  They ate {vegetable} soup for a week, and {hero} never planted a {vegetable} again.
                  Next year {hero} will plant something smaller than a {vegetable}.
    questions     What did {hero} plant? | {hero} planted a {vegetable}.
                  Who came to help first? | The {adj} {helper} came to help first.
                  Who came last? | {friend} the {friend_kind} came last.
                  What did they eat? | They ate {vegetable} soup.
    """,
}
