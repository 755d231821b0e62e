"""Phrase tables of the hospital corpus: the complaints of each department's patients.

A theme is three lines: names of the complaint (which follow "I have"), statements of it, and circumstances
that can follow either. Phrases are separated by " / ", themes by an empty line. Some names occur in several
departments on purpose ("tightness in the chest"): only the circumstance decides where such a message belongs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """One complaint: interchangeable names, full statements, and circumstances that can follow either."""

    names: tuple[str, ...]
    statements: tuple[str, ...]
    circumstances: tuple[str, ...]


def phrases(table: str) -> tuple[str, ...]:
    """The phrases of a table, of any number of lines."""
    return tuple(phrase for line in table.strip().splitlines() for phrase in line.split(" / "))


def _themes(table: str) -> tuple[Theme, ...]:
    """The themes of one department's table, of three lines each."""
    blocks = [list(map(phrases, block.splitlines())) for block in table.strip().split("\n\n")]
    if any(len(block) != 3 for block in blocks):
        raise ValueError("every theme needs three lines: names, statements and circumstances")
    return tuple(Theme(*block) for block in blocks)


THEMES = {
    "cardiology": _themes("""
a racing heart / palpitations / a pounding pulse / a skipping heartbeat / a fluttering feeling in the chest
my heart races / my pulse goes all over the place / my heart skips beats / my heart thumps up to my throat
while sitting still / after one cup of coffee / when lying on the left side / at irregular moments

tightness in the chest / pressure in the chest / chest pain / a heavy feeling behind the breastbone
my chest feels squeezed / it feels like a weight on my chest / a pain pulls from my chest into my left arm
on the second flight of stairs / when walking uphill / until the nitro spray works / when carrying shopping

shortness of breath / a lack of air / breathlessness / a loss of stamina
I have to stop for air / I get out of breath / I need three pillows to sleep
together with swollen feet / since the heart attack / while gaining weight from water / with a weak heart

swollen ankles / heavy legs / swollen feet / water in the legs
my ankles swell / my socks leave deep marks / my shoes no longer fit / both my legs are puffy
in spite of the water tablets / since the bypass operation / together with breathlessness at night

high blood pressure / blood pressure readings of 170 / unstable blood pressure / a low pulse
my blood pressure will not come down / the cuff at home shows 165 over 100 / my pulse drops below forty
even with two tablets a day / mostly in the morning / since the dose was changed / in spite of the new tablets

dizziness / fainting spells / light-headedness / short blackouts
I nearly faint / everything goes black before my eyes / I feel faint / I passed out for a moment
after getting up too fast / together with a slow pulse / while climbing stairs / since the new pressure pills

a pacemaker alarm / stent trouble / an old valve problem / trouble after a heart attack
my pacemaker check is overdue / I got a stent and feel worse / the valve they found is leaking more
since the discharge / and a flight is coming up / in spite of blood thinners / since the last echo

constant tiredness / a lack of energy / exhaustion / a drop in fitness
I am worn out / I have no strength left / I cannot keep up on walks any more
with an irregular pulse / since the infarction / with pressure in the chest / since the beta blocker
"""),
    "dermatology": _themes("""
a rash / red patches / a red, scaly area / spots all over
my skin is covered in red spots / a rash is spreading / the patches flake / my skin is red and raw
on both elbows / after a new washing powder / in the face / around the waist / on the shins

an itch / terrible itching / itching at night / constant scratching
everything itches / I scratch until it bleeds / the itching keeps me awake / it itches like mad
on the arms and the neck / with tiny red dots / between the fingers / since the hotel / where the wool rubs

a changing mole / a dark spot / a birthmark with a ragged edge / a crusty spot / a sore patch of skin
a mole has changed / a spot has grown / a dark patch now has a ragged edge / a crusty sore keeps opening
on the back / on the temple / on the shoulder blade / on the calf / after years of sunbathing

acne / deep pimples / painful boils / inflamed bumps
I break out in spots / painful lumps keep coming / my pimples leave scars
on the chin / in the armpits / on the back / since the steroids at the gym / under the beard

hair loss / bald patches / brittle nails / a thickened nail / dandruff
my hair comes out in handfuls / my nails crumble / I have a round bald spot / my scalp flakes
since the crash diet / since the chemotherapy / in spite of the special shampoo / after a stressful winter

hives / swollen lips / an allergic reaction / a burning rash / welts
I come up in welts / my eyelids swell / my skin burns / my lips puff up
after eating nuts / after a bee sting / in the sun / from the new antibiotic / from a face cream

a red, swollen leg / a weeping wound / an open ankle / blisters / warts
my lower leg is red and hot / a wound on my shin keeps weeping / I have blisters / warts are spreading
after a scratch from the cat / under the stocking / since the swimming pool / in spite of the ointment

eczema / cracked hands / very dry skin / psoriasis / a sore fold of skin
my hands crack / my eczema is back / the cortisone cream no longer helps / my psoriasis flares up
every winter / from all the disinfectant at work / in spite of the ointment / whenever work is stressful
"""),
    "gastroenterology": _themes("""
heartburn / acid reflux / a burning behind the breastbone / a sour taste in the mouth / burning in the chest
acid comes up / my chest burns / it burns up into my throat / I wake up with a sour mouth
after meals / when bending over / after a late dinner / after wine and tomatoes / without the acid blocker

stomach ache / cramps in the belly / a pain in the upper abdomen / belly pain / a griping pain below the ribs
my stomach hurts / my belly cramps / a pain comes and goes under my ribs / my stomach is in knots
an hour after eating / on an empty stomach / after fatty food / before every bowel movement / after milk

diarrhoea / loose stools / an urgent need for the toilet / blood in the stool / black stools
I run to the toilet ten times a day / my stools are watery / there is blood on the paper
after every meal / since the trip abroad / together with cramps / since the antibiotics / with mucus

constipation / a hard belly / bloating / trapped wind / a swollen abdomen
I cannot go for days / my belly swells like a balloon / I am blocked up / nothing moves in my bowels
in spite of laxatives / after bread and pasta / since the iron tablets / with a feeling of fullness

nausea / vomiting / a loss of appetite / constant queasiness / trouble keeping food down
I feel sick / I bring up my food / I cannot keep anything down / I have gone off all food
right after breakfast / at the smell of frying / with a bitter taste / after large meals / since a bad oyster

trouble swallowing / a lump in the throat / food stuck in the gullet / pain on swallowing
food gets stuck / I choke on dry bread / meat will not go down / swallowing hurts low in my chest
with solid food / unless I drink with it / at nearly every meal / in spite of chewing well

yellow eyes / itching / raised liver values / gallstones / a dull ache on the right side
my eyes look yellow / my liver values went up / they saw gallstones / I itch without a rash
with dark urine and pale stools / after years of wine / with jaundice / together with colic after cheese

unexplained weight loss / constant tiredness / low iron / bowel polyps / Crohn's disease
I lose weight without trying / my iron keeps dropping / my colitis is back / I am due a colonoscopy
with changes in the bowel / since the last colonoscopy / since the gluten test / after bowel surgery
"""),
    "neurology": _themes("""
migraine / a headache / splitting headaches / pressure in the head / a one-sided headache
my head pounds / one side of my head throbs / my head feels as if in a vice / my migraine is back
with flickering before the eyes / in bright light / on waking / three times a week / in spite of triptans

dizziness / vertigo / unsteadiness / a spinning feeling / trouble keeping balance
the room spins / I walk as if drunk / I sway to the left / I feel unsteady
when turning over in bed / in the dark / together with double vision / when looking up / with ringing ears

numbness in the hand / tingling fingers / pins and needles / burning feet / a numb patch
my fingers go to sleep / my feet tingle / my hand is numb / half my face feels numb
on one side of the body / at night / with clumsy fingers / since the chemotherapy / with a creeping cold

forgetfulness / memory lapses / trouble finding words / confusion / poor concentration
I forget names / words fail me / I lose my way / I leave the stove on
in familiar places / more and more often / as my late mother did / even after a good night / at seventy-four

a tremor / a shaking hand / stiffness / slow movements / twitching
my hand shakes / my handwriting has become tiny / my eyelid twitches / I shuffle when I walk
even at rest / with a stiff face / on one side / as the tablets wear off / like my father with Parkinson's

a seizure / absences / strange blank moments / a blackout with jerking / fits
I had a fit / I stare and do not answer / I woke on the floor with a bitten tongue / I lose a few seconds
without any warning / in front of colleagues / in spite of the epilepsy tablets / after a night without sleep

weakness in one arm / a drooping eyelid / double vision / a weak leg / slurred speech
my leg gives way / I drop things / my speech was slurred / I see double / my foot drags
for about ten minutes / towards the evening / after hot baths / since the stroke / without any pain

poor sleep / restless legs / an urge to move the legs / sudden sleepiness / violent dreams
my legs will not keep still / I fall asleep in mid-conversation / I kick in my sleep / my legs crawl
at bedtime / in the cinema / with jerks and kicks / since the new Parkinson tablets / on long drives
"""),
    "orthopaedics": _themes("""
knee pain / a swollen knee / a stiff knee / an unstable knee / clicking in the knee
my knee hurts / my knee locks / my knee swells / my knee gives way
going downstairs / after football / since twisting it / in the first steps of the morning / after squatting

lower back pain / a stiff back / back trouble / a pain in the flank / lumbago
my back seized up / my lower back hurts / I cannot straighten up / my back is killing me
after lifting a crate / when bending forward / after long sitting / after gardening / since moving house

hip pain / a pain in the groin / stiffness in the hip / a limp
my hip hurts / I limp / I can hardly put on my socks / my groin hurts on every step
after a short walk / when getting out of the car / with worn cartilage / with the old hip replacement

shoulder pain / a frozen shoulder / a weak arm / pain in the left arm / a torn tendon
my shoulder hurts / I cannot lift my arm / my arm hurts / something snapped in my shoulder
when reaching overhead / while combing hair / since the fall on the ice / when lying on it / after tennis

neck pain / numbness in the hand / a stiff neck / tingling fingers / a headache from the neck
my neck is stiff / a pain shoots from my neck into the arm / my fingers tingle / I can hardly turn my head
when turning the head / after hours at the computer / since the car crash / with a worn disc in the neck

a swollen ankle / heel pain / a sprained ankle / a sore foot / a bent big toe
my ankle is swollen / my heel hurts / my foot hurts / my big toe is crooked and sore
after a twist on the kerb / on the first steps / in tight shoes / after a long run / in spite of insoles

a sore wrist / swollen finger joints / a tennis elbow / a snapping thumb / a rubbing plaster
my wrist hurts / my fingers are stiff / my elbow hurts / my thumb catches
when opening jars / after a fall on the hand / in the morning for an hour / when gripping / under the cast

a pain across the ribs / a broken rib / a bruised chest / a pulled muscle / pain between the shoulder blades
my ribs hurt / I pulled a muscle / my chest wall hurts / it stabs between my shoulder blades
after a fall from the ladder / when twisting the trunk / with every movement / since the gym / after a tackle
"""),
    "psychiatry": _themes("""
panic attacks / a racing heart / a fear of dying / trembling / palpitations
panic comes over me / my heart races / I tremble and want to run / I am scared to death
in the supermarket queue / at the thought of going out / in crowded trains / though every ECG was fine

low mood / constant tiredness / a feeling of emptiness / a lack of energy / hopelessness
I feel empty / nothing gives me joy / I cannot get out of bed / I cry for no reason
since the divorce / most mornings / even on holiday / since losing the job / in spite of antidepressants

poor sleep / sleepless nights / nightmares / early waking / tiredness
I lie awake / I wake at three / I cannot switch off / I have the same nightmare
with the same worries / since the assault / thinking about work / dreading the next day

tightness in the chest / shortness of breath / a lump in the throat / pressure in the head / dizziness
my chest gets tight / I cannot breathe freely / my throat closes up / I feel dizzy
before every meeting / as soon as an argument starts / for fear of people / in lifts / worrying about money

stomach ache / nausea / a loss of appetite / binge eating / a fear of gaining weight
my stomach turns / I hardly eat / I eat until it hurts / I skip meals
out of fear of school / when feelings get too much / in secret / before exams / ashamed of my body

constant worry / inner unrest / irritability / nervousness / compulsive checking
I worry about everything / I snap at everyone / I check the door twenty times / my thoughts go in circles
from morning to night / for no real reason / at home and at work / since the separation / since the new job

poor concentration / memory lapses / burnout / exhaustion / trouble starting anything
I cannot concentrate / I forget everything / I am burnt out / I stare at the screen for hours
since the pressure at work / already as a child / feeling worthless / for sheer overload / with dark thoughts

too much drinking / a craving for alcohol / frightening voices / mood swings / gambling trouble
I drink too much / I cannot stop drinking / I hear voices / my mood swings from high to low
most evenings / when alone at night / since stopping the medication / more than the family knows
"""),
    "pulmonology": _themes("""
a cough / a dry cough / a barking cough / a constant need to clear the throat / a tickle in the throat
I cough / I cannot stop coughing / my cough is back / I keep clearing my throat
all night / since the flu / when laughing / in cold air / since the new flat with the mould

shortness of breath / a lack of air / breathlessness / laboured breathing
I get out of breath / I have to stop for air / my breath is short / I cannot get enough air
with a whistling sound / in spite of the inhaler / in dusty rooms / after years of smoking / with phlegm

wheezing / asthma / a whistling chest / asthma attacks / rattling breathing
my chest whistles / I wheeze / my asthma is back / I need my spray more often
in the pollen season / near cats / after running in the cold / at four in the morning / in smoke

phlegm / blood in the phlegm / green mucus / a chesty cough / recurring pneumonia
I bring up phlegm / I coughed up blood / thick mucus comes up / my pneumonia is not gone
every morning / with fever / in spite of antibiotics / after the third infection this winter

tightness in the chest / pressure in the chest / a stabbing pain in the side / a pain across the ribs
my chest feels tight / it stabs in my side / breathing hurts / my chest aches
on breathing in / with every cough / in fog and cold / since a chest infection / with a rattle

poor sleep / loud snoring / pauses in breathing / tiredness in the day / morning headaches
I stop breathing in my sleep / I snore / I wake up gasping / I nod off at red lights
with long pauses at night / in spite of the mask / when on my back / without the CPAP

night sweats / fever / unwanted weight loss / a shadow on the X-ray / a loss of stamina
I sweat through my pyjamas / I lose weight / I run a temperature / they saw a spot on my lung
with a lasting cough / after contact with tuberculosis / after years of smoking / since breathing in fumes

COPD / trouble with the inhaler / low oxygen / an old lung embolism / scarred lungs
my oxygen drops / my COPD is worse / my spray no longer works / my lungs are scarred
when walking to the shops / with wheezing / at the end of the day / after years as a welder
"""),
    "urology": _themes("""
burning when passing water / a bladder infection / stinging urine / a urinary infection / cloudy urine
it burns when I pee / my urine smells / my bladder hurts / I have another infection
for the third time this year / after swimming / in spite of antibiotics / with shivering / since the catheter

a weak stream / a full bladder all day / a slow flow / dribbling / a blocked bladder
my stream is weak / I have to press / my prostate is enlarged / it takes ages to start
in public toilets / in spite of prostate drops / every time I pee / since the catheter came out

getting up at night / poor sleep / an urgent need for the toilet / pressure down below / a weak bladder
I get up five times a night / I have to go every hour / I cannot hold it / I plan every walk by the toilets
to pass water / even when drinking little / at the sound of the tap / with only a few drops each time

blood in the urine / dark urine / pink urine / clots in the toilet
my urine is red / I saw blood when I peed / my urine is dark brown / there was blood in the bowl
without any pain / after jogging / since the blood thinners / at the end of passing water

a pain in the flank / lower back pain / kidney stones / colic / belly pain
my side hurts in waves / a pain moves from my back to the groin / my kidneys ache / I passed a stone
with a constant urge to pee / with blood in the urine / in spite of drinking a lot / with fever and chills

a lump down below / a pain in the groin / a swelling in the groin / an itch down below / a sore spot down there
my testicle hurts / I felt a lump in my testicle / one testicle is swollen / my foreskin is sore
since a kick at football / when standing for long / when passing water / on touching it / since the hernia

wet nights / leaking urine / a weak pelvic floor / bladder trouble / wet underwear
I leak / I lose urine / I need pads / I wet myself
when coughing / when laughing / since the pelvic fracture / after the operation / when lifting something

trouble in bed / no desire for sex / a kidney cyst / worse kidney values / protein in the urine
my erections fail / my PSA went up / I want a vasectomy / they saw a cyst on my kidney
since the diabetes / since the last kidney check / according to the ultrasound / in spite of the tablets
"""),
}

# Departments whose patients sound alike: where side complaints, false leads and misrouted messages come from.
NEIGHBOURS = {
    "cardiology": ("pulmonology", "psychiatry", "gastroenterology", "neurology"),
    "dermatology": ("gastroenterology", "orthopaedics", "urology", "psychiatry"),
    "gastroenterology": ("cardiology", "urology", "psychiatry", "dermatology"),
    "neurology": ("orthopaedics", "psychiatry", "cardiology", "dermatology"),
    "orthopaedics": ("neurology", "urology", "dermatology", "pulmonology"),
    "psychiatry": ("neurology", "cardiology", "gastroenterology", "pulmonology"),
    "pulmonology": ("cardiology", "psychiatry", "gastroenterology", "orthopaedics"),
    "urology": ("gastroenterology", "orthopaedics", "dermatology", "neurology"),
}

# Who works there, and what such a doctor would rule out.
SPECIALISTS = {
    "cardiology": ("cardiologist", "the heart"),
    "dermatology": ("dermatologist", "the skin"),
    "gastroenterology": ("stomach specialist", "the stomach"),
    "neurology": ("neurologist", "the nerves"),
    "orthopaedics": ("bone specialist", "the joints"),
    "psychiatry": ("psychiatrist", "stress"),
    "pulmonology": ("lung specialist", "the lungs"),
    "urology": ("urologist", "the kidneys"),
}
